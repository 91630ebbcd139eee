"""How sure a model was of an answer, from the log-probabilities of its tokens: what a cascade goes by."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

TokenScore = Literal["min", "mean", "low"]
TOKEN_SCORES = ("min", "mean", "low")
WORST = 0.1  # of an answer's tokens, whose mean is "low"


def of_tokens(logprobs: Sequence[float], score: TokenScore) -> float:
    """From 0 to 1: of the tokens' probabilities the least ("min"), their geometric mean ("mean"), that of the worst tenth
    ("low"); 0 of an answer without a token."""
    if not logprobs:
        return 0.0
    values = np.sort(logprobs)
    if score == "low":
        values = values[: max(1, round(WORST * len(values)))]
    return float(np.exp(values[0] if score == "min" else values.mean()))
