"""Ratios of paired measurements: two speeds measured in the same round, under the same load of the machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the pairs' ratios, and an interval that contains the true median with probability `confidence`."""

    median: float
    low: float
    high: float
    confidence: float


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ours divided by theirs, pair by pair. The interval uses order statistics and assumes no distribution."""
    ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    rank, confidence = _rank(len(ratios))
    return Ratio(median(ratios), ratios[rank], ratios[-1 - rank], confidence)


def _rank(count: int) -> tuple[int, float]:
    """Number of sorted values to leave out at each end, and the confidence of the rest.

    It is the largest number that keeps CONFIDENCE; 0 if there are too few values for it. The median lies outside the sorted
    values [k .. n-1-k] if at most k of n values lie on one side of it, a binomial tail with p = 1/2.
    """
    tail, best = 0.0, (0, max(0.0, 1 - 2 * 0.5**count))
    for k in range((count - 1) // 2 + 1):
        tail += math.comb(count, k) * 0.5**count
        if 1 - 2 * tail < CONFIDENCE:
            break
        best = (k, 1 - 2 * tail)
    return best
