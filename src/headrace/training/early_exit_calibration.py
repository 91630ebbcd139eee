"""Calibrated thresholds for early exits of a decoder, or for the smaller model of a token cascade.

Every threshold is tried by writing answers with it, since a token that exits changes all tokens after it. Learn-then-Test
(stats.calibration) then gives the guarantee.

Source: CALM, Schuster et al., arXiv 2207.07061.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from headrace.data.outputs import CompletionOutput, whole
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.startup.thresholds import CalibratedThreshold
from headrace.stats.calibration import Calibration, calibrate
from headrace.stats.paired_ratio import rouge_l

# Thresholds, the safest first.
GRID = (0.999, 0.99, 0.98, 0.97, 0.95, 0.93, *(round(0.9 - 0.05 * step, 2) for step in range(18)))


@dataclass(frozen=True, slots=True)
class CalibrationConfig:
    """Settings of a calibration on greedy answers of at most `max_tokens` tokens.

    loss: "text" for 1 − ROUGE-L to the full model's answer, "token" for the share of tokens the full model would not write,
    "risk" for how much less ROUGE-L to a reference the answer has than the full model's (0 if it has more).
    decay: how much the threshold falls along an answer. slope: how much more confidence earlier exits need. cascade: a smaller
    model writes instead of an exit.
    """

    criterion: str = "max_prob"
    decay: float = 0.0
    slope: float = 0.0
    max_tokens: int = 64
    loss: Literal["text", "token", "risk"] = "text"
    delta: float = 0.1
    epsilon: float = 0.05
    cascade: bool = False


def calibrate_threshold(
    llm: LLM,
    prompts: Sequence[list[int]],
    config: CalibrationConfig,
    on_threshold: Callable[[float, float], None],
    grid: Sequence[float] = GRID,
    references: Sequence[list[int]] | None = None,
) -> tuple[CalibratedThreshold | None, Calibration]:
    """Return the lowest valid threshold, None if there is none, and all tests.

    on_threshold: receives each threshold with its mean loss. references: token ids of a right answer to each prompt, for the
    loss "risk". Raises ValueError, AdmissionError.
    """
    measured = measure_losses(llm, prompts, config, references)
    mean_layers: dict[float, list[float]] = {}

    def losses(threshold: float) -> np.ndarray:
        values, mean_layers[threshold] = measured(threshold)
        on_threshold(threshold, float(values.mean()))
        return values

    result = calibrate(losses, grid, delta=config.delta, epsilon=config.epsilon)
    if result.threshold is None or result.risk is None:
        return None, result
    layers = mean_layers[result.threshold] or [0.0]
    data = hashlib.sha256(msgspec.json.encode(list(prompts))).hexdigest()
    spread = float(np.mean(layers)), float(np.std(layers))
    settings = config.criterion, result.threshold, config.decay, config.max_tokens, config.loss, config.delta, config.epsilon
    return CalibratedThreshold(*settings, result.n, result.risk, *spread, data, slope=config.slope), result


def measure_losses(
    llm: LLM, prompts: Sequence[list[int]], config: CalibrationConfig, references: Sequence[list[int]] | None = None
) -> Callable[[float], tuple[np.ndarray, list[float]]]:
    """A function that writes answers with a threshold and returns their losses [prompts], and the mean layers per token of each
    answer that may exit. Raises ValueError, AdmissionError."""
    right = references if references is not None else [None] * len(prompts)
    if config.loss == "risk" and any(one is None for one in right):
        raise ValueError("the loss risk compares with references, and some prompts have none")
    plain = SamplingParams(temperature=0.0, max_tokens=config.max_tokens)
    complete = [output.outputs[0].token_ids for output in whole(llm.generate(list(prompts), plain))]

    def measure(threshold: float) -> tuple[np.ndarray, list[float]]:
        params = _early_exit_params(plain, config, threshold)
        answers = [output.outputs[0] for output in whole(llm.generate(list(prompts), params))]
        values = [_loss(config.loss, *one) for one in zip(answers, complete, right, strict=True)]
        layers = [float(np.mean([exit.layers for exit in answer.exits])) for answer in answers if answer.exits]
        return np.array(values), layers

    return measure


def _early_exit_params(plain: SamplingParams, config: CalibrationConfig, threshold: float) -> SamplingParams:
    audit = config.loss == "token"
    if config.cascade:
        return plain.replace(cascade_threshold=threshold, cascade_criterion=config.criterion, cascade_audit=audit)
    decay, slope = config.decay, config.slope
    return plain.replace(
        exit_threshold=threshold, exit_criterion=config.criterion, exit_decay=decay, exit_slope=slope, exit_audit=audit
    )


def _loss(loss: str, answer: CompletionOutput, complete: list[int], reference: list[int] | None = None) -> float:
    """Loss of one answer in [0, 1]. complete: token ids of the full model's answer."""
    if loss == "risk" and reference is not None:
        return max(0.0, rouge_l(complete, reference) - rouge_l(answer.token_ids, reference))
    if loss == "text":
        return 1 - rouge_l(answer.token_ids, complete)
    exits = answer.exits or []
    deepest = max((exit.layers for exit in exits), default=0)
    wrong = sum(exit.layers < deepest and len(set(exit.votes)) == 2 for exit in exits)
    return wrong / max(1, len(exits))
