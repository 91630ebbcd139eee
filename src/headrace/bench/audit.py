"""What the exits of a decoder and its whole model say at every token of texts.

A text is read token by token with what comes next known: every exit is asked about the same rows, by every criterion, through
the engine itself; nothing leaves.
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
    """A text of which `tokens` come after `prompt`."""

    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Votes:
    """Of tokens of texts: after so many `layers` [exits + 1] each exit stands, and the model ends; which token each
    chooses, `choices` [exits + 1, tokens]; how `sure` each exit was, by criterion [exits, tokens]; the token that `came`
    [tokens]; and how many of its text's were `written` [tokens] before it."""

    layers: np.ndarray
    choices: np.ndarray
    sure: dict[str, np.ndarray]
    came: np.ndarray
    written: np.ndarray

    @property
    def agree(self) -> np.ndarray:
        """Whether an exit says what the whole model does: [exits, tokens]."""
        same: np.ndarray = self.choices[:-1] == self.choices[-1]
        return same


class Reading(Sampling):
    """A text that is known: what is drawn is told, and not taken."""

    speculates = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        return [[Child(token=self.tokens[len(seq.tokens) - seq.prompt_len])] for seq, _ in outputs]


def criteria_of(heads: Heads) -> tuple[str, ...]:
    """By what these exits can be sure: saturation compares two layers, and a classifier must have been fitted."""
    without = {"saturation"} if heads.layers[0] < 2 else set()
    without |= set() if heads.judges else {"classifier"}
    return tuple(one for one in CRITERIA if one not in without)


def audit(llm: LLM, heads: Heads, texts: Sequence[Text], criteria: Sequence[str]) -> Votes:
    """What is said at each token of the texts but their first ones, which the whole model writes. `llm` has these exits, and is
    idle. Raises ValueError where a text cannot be read, or none has two tokens."""
    if not any(len(text.tokens) > 1 for text in texts):
        raise ValueError("no text is longer than one token, which the whole model writes; give other prompts")
    early_exit = llm.runner.leaving
    assert early_exit is not None
    pairs: list[list[list[int]]] = []
    sure: dict[str, list[list[float]]] = {criterion: [] for criterion in criteria}
    for number, layers in enumerate(heads.layers):
        with early_exit.exit_at(number, layers):
            for criterion, rows in sure.items():
                exited = [one for each in read(llm, texts, criterion) for one in each[1:]]
                rows.append([float(one.confidence or 0.0) for one in exited])
        pairs.append([list(one.votes) for one in exited])
    votes = np.array(pairs)  # [exits, tokens, (exit, whole model)]
    return Votes(
        np.array([*heads.layers, llm.model_config.num_layers]),
        np.concatenate([votes[..., 0], votes[-1:, :, 1]]),
        {criterion: np.array(rows) for criterion, rows in sure.items()},
        np.array([token for text in texts for token in text.tokens[1:]]),
        np.array([at for text in texts for at in range(1, len(text.tokens))]),
    )


def read(llm: LLM, texts: Sequence[Text], criterion: str) -> list[list[Exited]]:
    """For each text, at each of its tokens, how sure the exit is and what it and the whole model would write."""
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
        outputs.append(llm.add(text.prompt, params, strategy=Reading(text.tokens)))
    while not all(output.finished for output in outputs):
        llm.step()
    return [output.outputs[0].exits or [] for output in whole(outputs)]
