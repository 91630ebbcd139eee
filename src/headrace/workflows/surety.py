"""How sure a model was of an answer, from the log-probabilities of its tokens: what a cascade goes by."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from headrace.data.params import SamplingParams

TokenScore = Literal["min", "mean", "low"]
TOKEN_SCORES = ("min", "mean", "low")
WORST = 0.1  # of an answer's tokens, whose mean is "low"


def cut_off(finish_reason: str | None, tokens: int, params: SamplingParams) -> bool:
    """Whether an answer of so many tokens ended because a model's context was full, where another's may hold more."""
    return finish_reason == "length" and (params.max_tokens is None or tokens < params.max_tokens)


def of_tokens(logprobs: Sequence[float], score: TokenScore) -> float:
    """From 0 to 1: of the tokens' probabilities the least ("min"), their geometric mean ("mean"), that of the worst tenth
    ("low"); 0 of an answer without a token."""
    if not logprobs:
        return 0.0
    values = np.sort(logprobs)
    if score == "low":
        values = values[: max(1, round(WORST * len(values)))]
    return float(np.exp(values[0] if score == "min" else values.mean()))
