"""A threshold with a guarantee for tokens that leave a decoder early (CALM, Schuster et al. 2022), or that the smaller model of
a cascade writes. The loop is closed: every
threshold is tried by writing answers with it, as a token that leaves changes all that come after it."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from headrace.data.outputs import CompletionOutput, whole
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.startup.rules import Rule
from headrace.stats.calibration import Calibration, calibrate
from headrace.stats.text_similarity import rouge_l

GRID = (0.999, 0.99, 0.98, 0.97, 0.95, 0.93, *(round(0.9 - 0.05 * step, 2) for step in range(18)))  # from the safest on
Tell = Callable[[float, float], None]  # a threshold that was tried, and its mean loss


@dataclass(frozen=True, slots=True)
class Task:
    """What is calibrated, and how well: answers of `max_tokens` at most, none of them drawn."""

    criterion: str = "max_prob"
    decay: float = 0.0
    max_tokens: int = 64
    loss: Literal["text", "token"] = "text"
    delta: float = 0.1
    epsilon: float = 0.05
    cascade: bool = False  # a smaller model writes, in an exit's place


def calibrated(
    llm: LLM, prompts: Sequence[list[int]], task: Task, tell: Tell, grid: Sequence[float] = GRID
) -> tuple[Rule | None, Calibration]:
    """The lowest threshold that can be shown to be good enough, None where there is none, and all that were tried. Raises
    ValueError, AdmissionError."""
    plain = SamplingParams(temperature=0.0, max_tokens=task.max_tokens)
    complete = [output.outputs[0].token_ids for output in whole(llm.generate(list(prompts), plain))]
    depths: dict[float, list[float]] = {}

    def losses(threshold: float) -> np.ndarray:
        answers = [output.outputs[0] for output in whole(llm.generate(list(prompts), _leaving(plain, task, threshold)))]
        lost = [_lost(task.loss, answer, best) for answer, best in zip(answers, complete, strict=True)]
        depths[threshold] = [float(np.mean([one.layers for one in answer.exits])) for answer in answers if answer.exits]
        tell(threshold, float(np.mean(lost)))
        return np.array(lost)

    found = calibrate(losses, grid, delta=task.delta, epsilon=task.epsilon)
    if found.threshold is None or found.risk is None:
        return None, found
    layers = depths[found.threshold] or [0.0]  # of answers with a token
    data = hashlib.sha256(msgspec.json.encode(list(prompts))).hexdigest()
    numbers = float(np.mean(layers)), float(np.std(layers))
    asked = task.criterion, found.threshold, task.decay, task.max_tokens, task.loss, task.delta, task.epsilon
    return Rule(*asked, found.n, found.risk, *numbers, data), found


def _leaving(plain: SamplingParams, task: Task, threshold: float) -> SamplingParams:
    audit = task.loss == "token"
    if task.cascade:
        return plain.replace(cascade_threshold=threshold, cascade_criterion=task.criterion, cascade_audit=audit)
    return plain.replace(exit_threshold=threshold, exit_criterion=task.criterion, exit_decay=task.decay, exit_audit=audit)


def _lost(loss: str, answer: CompletionOutput, complete: list[int]) -> float:
    if loss == "text":
        return 1 - rouge_l(answer.token_ids, complete)
    exits = answer.exits or []
    deepest = max((one.layers for one in exits), default=0)
    wrong = sum(one.layers < deepest and len(set(one.votes)) == 2 for one in exits)
    return wrong / max(1, len(exits))
