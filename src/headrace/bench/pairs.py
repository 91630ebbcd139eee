"""Ratios of paired measurements: what two engines did in the same round, under the same weather."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of the pairs' ratios, and an interval around it that holds the true median with `confidence`."""

    median: float
    low: float
    high: float
    confidence: float


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ours over theirs, pair by pair. The interval is that of order statistics and assumes nothing about the distribution."""
    ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    rank, confidence = _rank(len(ratios))
    return Ratio(median(ratios), ratios[rank], ratios[-1 - rank], confidence)


def _rank(count: int) -> tuple[int, float]:
    """How many values to leave out at each end: the most that keep CONFIDENCE, none where there are too few values for it.

    The median lies outside the sorted values [k .. n-1-k] if at most k of n fall on one side of it: fair coins.
    """
    tail, best = 0.0, (0, max(0.0, 1 - 2 * 0.5**count))
    for k in range((count - 1) // 2 + 1):
        tail += math.comb(count, k) * 0.5**count
        if 1 - 2 * tail < CONFIDENCE:
            break
        best = (k, 1 - 2 * tail)
    return best
