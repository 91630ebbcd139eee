"""Confidence of a model in its answers, from their log-probabilities, and how well it separates right from wrong."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

TokenScore = Literal["min", "mean", "low"]
TOKEN_SCORES = ("min", "mean", "low")
# Share of an answer's tokens, the least probable ones, that the score "low" averages.
LOW_SHARE = 0.1
DEFERRED_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def token_confidence(logprobs: Sequence[float], score: TokenScore) -> float:
    """Confidence of an answer in [0, 1] from the log-probabilities of its tokens; 0 if it has no token.

    "min": the least probability. "mean": the geometric mean. "low": the geometric mean of the least probable tenth.
    """
    if not logprobs:
        return 0.0
    values = np.sort(logprobs)
    if score == "low":
        values = values[: max(1, round(LOW_SHARE * len(values)))]
    return float(np.exp(values[0] if score == "min" else values.mean()))


def cut_by_context(finish_reason: str | None, tokens: int, max_tokens: int | None) -> bool:
    """Whether an answer of `tokens` tokens ended because the model's context was full. A larger context may hold the rest."""
    return finish_reason == "length" and (max_tokens is None or tokens < max_tokens)


def auroc(scores: Sequence[float], correct: Sequence[bool]) -> float:
    """Area under the ROC curve: the probability that a correct answer scores above a wrong one, ties counted by half.

    0.5 is chance, 1 a perfect separation. NaN unless there are correct and wrong answers.
    """
    values, is_correct = np.asarray(scores, float), np.asarray(correct, bool)
    if is_correct.all() or not is_correct.any():
        return float("nan")
    difference = values[is_correct][:, None] - values[~is_correct][None, :]
    return float((difference > 0).mean() + 0.5 * (difference == 0).mean())


@dataclass(frozen=True, slots=True)
class Deferral:
    """One point of a cascade's quality curve: the prompts with the lowest scores, `share` of all, go to the large model.

    by_chance: accuracy if as many prompts were deferred at random. cost: mean cost of a prompt.
    """

    share: float
    accuracy: float
    by_chance: float
    cost: float


def deferrals(
    scores: Sequence[float],
    small: Sequence[bool],
    large: Sequence[bool],
    costs: tuple[float, float],
    shares: Sequence[float] = DEFERRED_SHARES,
) -> list[Deferral]:
    """Return the curve of accuracy against cost of a cascade of two models, one point for each of `shares`.

    scores: confidence of the small model in each answer. small, large: whether each model's answer is correct.
    costs: mean cost of a prompt to the small and to the large model.
    """
    order = np.argsort(np.asarray(scores, float), kind="stable")
    small_correct, large_correct = np.asarray(small, float)[order], np.asarray(large, float)[order]
    curve = []
    for share in shares:
        count = round(share * len(order))
        deferred = count / len(order)
        accuracy = (large_correct[:count].sum() + small_correct[count:].sum()) / len(order)
        by_chance = (1 - deferred) * small_correct.mean() + deferred * large_correct.mean()
        curve.append(Deferral(deferred, float(accuracy), float(by_chance), costs[0] + deferred * costs[1]))
    return curve


def losses_against(scores: Sequence[float], small: Sequence[bool], large: Sequence[bool]) -> Callable[[float], np.ndarray]:
    """Return the loss function of a cascade for `stats.calibration.calibrate`.

    A prompt loses 1 if the cascade keeps a wrong answer of the small model where the large model is right, otherwise 0.
    """
    values, small_correct, large_correct = np.asarray(scores, float), np.asarray(small, bool), np.asarray(large, bool)
    return lambda threshold: ((values >= threshold) & ~small_correct & large_correct).astype(float)
