"""A threshold with a guarantee: Learn then Test with a fixed sequence of hypotheses (Angelopoulos et al., 2021; CALM, 2022).

What leaves early, defers or skips is controlled by one threshold. The safest is tried first; each next one must show, on inputs
set aside for it, that its mean loss is at most `delta`, or the search ends. So with probability 1 - `epsilon` over those inputs
the mean loss of inputs like them is at most `delta`, whatever the losses look like. Losses lie in [0, 1].
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

Bound = Literal["hb", "hoeffding"]  # Hoeffding-Bentkus, or the older and weaker bound


@dataclass(frozen=True, slots=True)
class Tried:
    """A threshold that was looked at: its mean loss, and the p-value of "its mean loss is above delta"."""

    threshold: float
    risk: float
    p_value: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """`threshold` is None where nothing could be shown: then nothing may leave early. `risk`: its mean loss on `n` inputs."""

    threshold: float | None
    risk: float | None
    delta: float
    epsilon: float
    bound: Bound
    n: int
    tried: list[Tried] = field(default_factory=list)


def p_value(risk: float, n: int, delta: float, bound: Bound = "hb") -> float:
    """The largest probability that a mean of `n` independent losses in [0, 1] is at most `risk` where its expectation is above
    `delta`: of Hoeffding, or the lesser of Hoeffding's (with the relative entropy) and Bentkus' (Bates et al., 2021)."""
    if bound == "hoeffding":
        return math.exp(-2 * n * max(delta - risk, 0.0) ** 2)
    low = min(risk, delta)
    entropy = _term(low, delta) + _term(1 - low, 1 - delta)
    return min(1.0, math.exp(-n * entropy), math.e * _binomial(math.ceil(n * risk - 1e-9), n, delta))


def minimum_n(delta: float, epsilon: float = 0.05, bound: Bound = "hb") -> int:
    """The fewest inputs that can show anything: on fewer not even a mean loss of 0 is enough."""
    n = 1
    while p_value(0.0, n, delta, bound) > epsilon:
        n *= 2
    low = n // 2
    while n - low > 1:
        middle = (low + n) // 2
        low, n = (low, middle) if p_value(0.0, middle, delta, bound) <= epsilon else (middle, n)
    return n


def calibrate(
    losses: Callable[[float], np.ndarray],
    grid: Sequence[float],
    *,
    delta: float,
    epsilon: float = 0.05,
    bound: Bound = "hb",
) -> Calibration:
    """The last threshold of `grid`, which goes from the safest on, for which all before it and itself pass. `losses` gives a
    threshold's losses [n] in [0, 1] and is asked no further than the first that fails. Raises ValueError."""
    if not 0 < delta < 1 or not 0 < epsilon < 1:
        raise ValueError(f"delta and epsilon lie between 0 and 1, not {delta:g} and {epsilon:g}")
    found: Tried | None = None
    tried: list[Tried] = []
    n = 0
    for each in grid:
        lost = np.asarray(losses(each), float)
        if lost.size == 0 or not ((lost >= 0) & (lost <= 1)).all():
            raise ValueError("losses are a row of numbers from 0 to 1; scale them")
        n, mean = lost.size, float(lost.mean())
        tried.append(Tried(each, mean, p_value(mean, n, delta, bound)))
        if tried[-1].p_value > epsilon:
            break
        found = tried[-1]
    threshold, risk = (None, None) if found is None else (found.threshold, found.risk)
    return Calibration(threshold, risk, delta, epsilon, bound, n, tried)


def calibration_error(sure: ArrayLike, right: ArrayLike, bins: int) -> float:
    """The expected calibration error (Naeini et al. 2015; Guo et al. 2017): how far confidences [n] in [0, 1] lie from how
    often they are right, on average, in bins of equal width. A high probability is not correctness."""
    confidences, held = np.asarray(sure, np.float64), np.asarray(right, np.float64)
    each = np.minimum((np.asarray(sure) * bins).astype(int), bins - 1)
    return float(np.abs(np.bincount(each, confidences - held)).sum() / len(confidences))


def _term(a: float, b: float) -> float:
    """a log(a / b), and 0 for a = 0."""
    return a * math.log(a / b) if a > 0 else 0.0


def _binomial(k: int, n: int, p: float) -> float:
    """P(Bin(n, p) <= k), by its terms' logarithms."""
    if k >= n:
        return 1.0
    at = np.arange(k + 1)
    gamma = np.array([math.lgamma(i + 1) for i in range(n + 1)])
    terms = gamma[n] - gamma[at] - gamma[n - at] + at * math.log(p) + (n - at) * math.log1p(-p)
    return float(np.exp(terms).sum())
