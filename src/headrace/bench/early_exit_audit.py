"""Predictions of a decoder's exits and of its full model at every token of given texts.

The engine reads a text token by token with the next token forced. Every exit computes its prediction and its confidence, by
every criterion, on the same rows. No token exits early.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.data.outputs import RequestOutput, whole
from headrace.data.params import MOST_SURE, SamplingParams
from headrace.data.plan import Exited
from headrace.data.types import Child, Request
from headrace.decoding.base import Outputs
from headrace.decoding.sampling import Sampling
from headrace.llm import LLM
from headrace.runner.heads import Heads

CRITERIA = ("max_prob", "margin", "saturation", "classifier")


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, and the tokens that follow it."""

    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class ExitPredictions:
    """Predictions of the exits and, as the last row, of the full model, over the tokens of all texts.

    `layers` [exits + 1]: layers before each exit. `choices` [exits + 1, tokens]: predicted tokens. `confidence`: by criterion
    [exits, tokens]. `actual` [tokens]: tokens of the texts. `position` [tokens]: index of each token in its text.
    """

    layers: np.ndarray
    choices: np.ndarray
    confidence: dict[str, np.ndarray]
    actual: np.ndarray
    position: np.ndarray

    @property
    def agree(self) -> np.ndarray:
        """Whether an exit predicts the full model's token: [exits, tokens] bool."""
        same: np.ndarray = self.choices[:-1] == self.choices[-1]
        return same


class ForcedText(Sampling):
    """Strategy that ignores the sampled tokens and emits those of a given text."""

    speculates = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        return [[Child(token=self.tokens[len(seq.tokens) - seq.prompt_len])] for seq, _ in outputs]


def criteria_of(heads: Heads) -> tuple[str, ...]:
    """Criteria that these exits support: saturation needs two layers, and `classifier` a fitted classifier."""
    without = {"saturation"} if heads.layers[0] < 2 else set()
    without |= set() if heads.judges else {"classifier"}
    return tuple(criterion for criterion in CRITERIA if criterion not in without)


def audit(llm: LLM, heads: Heads, texts: Sequence[Text], criteria: Sequence[str]) -> ExitPredictions:
    """Predictions at each token of the texts except the first ones, which always come from the full model.

    llm: idle, opened with the exits of `heads`. Raises ValueError if no text has two tokens, or a text cannot be read.
    """
    if not any(len(text.tokens) > 1 for text in texts):
        raise ValueError("no text is longer than one token, which the whole model writes; give other prompts")
    early_exit = llm.runner.leaving
    assert early_exit is not None
    pairs: list[list[list[int]]] = []
    confidence: dict[str, list[list[float]]] = {criterion: [] for criterion in criteria}
    for number, layers in enumerate(heads.layers):
        with early_exit.exit_at(number, layers):
            for criterion, rows in confidence.items():
                exited = [record for text in read(llm, texts, criterion) for record in text[1:]]
                rows.append([float(record.confidence or 0.0) for record in exited])
        pairs.append([list(record.votes) for record in exited])
    # [exits, tokens, (exit, full model)]
    votes = np.array(pairs)
    return ExitPredictions(
        np.array([*heads.layers, llm.model_config.num_layers]),
        np.concatenate([votes[..., 0], votes[-1:, :, 1]]),
        {criterion: np.array(rows) for criterion, rows in confidence.items()},
        np.array([token for text in texts for token in text.tokens[1:]]),
        np.array([at for text in texts for at in range(1, len(text.tokens))]),
    )


def read(llm: LLM, texts: Sequence[Text], criterion: str) -> list[list[Exited]]:
    """Exit records of each text, one a token: confidence, and the tokens of the exit and of the full model."""
    outputs: list[RequestOutput] = []
    for text in texts:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=len(text.tokens),
            ignore_eos=True,
            exit_threshold=MOST_SURE,
            exit_criterion=criterion,  # type: ignore[arg-type]
            exit_audit=True,
        )
        outputs.append(llm.add(text.prompt, params, strategy=ForcedText(text.tokens)))
    while not all(output.finished for output in outputs):
        llm.step()
    return [output.outputs[0].exits or [] for output in whole(outputs)]
