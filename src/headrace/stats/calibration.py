"""Thresholds with a guarantee (Learn then Test with a fixed sequence of hypotheses), and the expected calibration error.

One threshold controls early exits, deferrals or skipped checks. The calibration tests a list of thresholds from the safest on,
on inputs set aside for it, and stops at the first whose mean loss it cannot show to be at most `delta`. With probability
1 - `epsilon` over those inputs, the expected loss of the chosen threshold is at most `delta`, for any distribution of losses
in [0, 1].

Sources: Angelopoulos et al., "Learn then Test", arXiv 2110.01052; Schuster et al., "CALM", arXiv 2207.07061.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

# Hoeffding-Bentkus, or the older and weaker Hoeffding bound.
Bound = Literal["hb", "hoeffding"]


@dataclass(frozen=True, slots=True)
class ThresholdTest:
    """Test of one threshold: its mean loss, and the p-value of the hypothesis that its expected loss is above `delta`."""

    threshold: float
    risk: float
    p_value: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result of `calibrate`, with all tests in order.

    threshold, risk: the chosen threshold and its mean loss on `n` inputs; None if no threshold passed its test.
    """

    threshold: float | None
    risk: float | None
    delta: float
    epsilon: float
    bound: Bound
    n: int
    tried: list[ThresholdTest] = field(default_factory=list)


def p_value(risk: float, n: int, delta: float, bound: Bound = "hb") -> float:
    """Upper bound of the probability that `n` losses in [0, 1] have a mean ≤ `risk` although their expectation is > `delta`.

    "hb" takes the lesser of Hoeffding's bound (with the relative entropy) and Bentkus' bound.

    Source: Bates et al., "Distribution-Free, Risk-Controlling Prediction Sets", arXiv 2101.02703, section 3.
    """
    if bound == "hoeffding":
        return math.exp(-2 * n * max(delta - risk, 0.0) ** 2)
    low = min(risk, delta)
    entropy = _entropy_term(low, delta) + _entropy_term(1 - low, 1 - delta)
    return min(1.0, math.exp(-n * entropy), math.e * _binomial_cdf(math.ceil(n * risk - 1e-9), n, delta))


def minimum_n(delta: float, epsilon: float = 0.05, bound: Bound = "hb") -> int:
    """Return the fewest inputs with which a mean loss of 0 passes the test; with fewer no threshold can pass."""
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
    """Choose the last threshold of `grid` up to which every threshold passes its test.

    losses: returns the losses [n] in [0, 1] of a threshold; called in the order of `grid`, up to the first test that fails.
    grid: thresholds, the safest first.
    Raises ValueError if delta, epsilon or a loss is out of range.
    """
    if not 0 < delta < 1 or not 0 < epsilon < 1:
        raise ValueError(f"delta and epsilon lie between 0 and 1, not {delta:g} and {epsilon:g}")
    passed: ThresholdTest | None = None
    tried: list[ThresholdTest] = []
    n = 0
    for candidate in grid:
        values = np.asarray(losses(candidate), float)
        if values.size == 0 or not ((values >= 0) & (values <= 1)).all():
            raise ValueError("losses are a row of numbers from 0 to 1; scale them")
        n, mean = values.size, float(values.mean())
        tried.append(ThresholdTest(candidate, mean, p_value(mean, n, delta, bound)))
        if tried[-1].p_value > epsilon:
            break
        passed = tried[-1]
    threshold, risk = (None, None) if passed is None else (passed.threshold, passed.risk)
    return Calibration(threshold, risk, delta, epsilon, bound, n, tried)


@dataclass(frozen=True, slots=True)
class Redraws:
    """Shares of redraws whose chosen threshold loses more than `delta` on inputs that did not choose it.

    tested: thresholds of `calibrate`. naive: the lowest threshold whose mean loss on the calibration inputs is at most `delta`,
    up to the first that is above. risk: mean loss of the tested thresholds on the other inputs; 0 for a redraw without one.
    chosen: share of redraws in which `calibrate` chose a threshold; if 0, `tested` is 0 by construction.
    """

    tested: float
    naive: float
    risk: float
    chosen: float


def redraw(
    losses: Mapping[float, np.ndarray], n: int, *, delta: float, epsilon: float = 0.05, redraws: int = 500, seed: int = 0
) -> Redraws:
    """Repeat a calibration on `n` inputs, drawn anew each time, and judge each threshold on all other inputs.

    losses: by threshold, the safest first, the losses [inputs] in [0, 1]. A redraw without a threshold loses nothing. The mean
    of few other inputs scatters around the risk, which adds violations to both counts.
    """
    rng, count = np.random.default_rng(seed), len(next(iter(losses.values())))
    tested = naive = chosen = 0
    risks = []
    for _ in range(redraws):
        order = rng.permutation(count)
        calibration = {threshold: values[order[:n]] for threshold, values in losses.items()}
        fresh = order[n:]
        found = calibrate(calibration.__getitem__, [*losses], delta=delta, epsilon=epsilon)
        low = [threshold for threshold, _ in takewhile(lambda pair: pair[1].mean() <= delta, calibration.items())]
        risks.append(0.0 if found.threshold is None else float(losses[found.threshold][fresh].mean()))
        chosen += found.threshold is not None
        tested += risks[-1] > delta
        naive += bool(low) and losses[low[-1]][fresh].mean() > delta
    return Redraws(tested / redraws, naive / redraws, float(np.mean(risks)), chosen / redraws)


def calibration_error(confidences: ArrayLike, correct: ArrayLike, bins: int) -> float:
    """Expected calibration error: mean distance between confidence and accuracy, in `bins` bins of equal width.

    confidences: [n] in [0, 1]. correct: [n] bool.

    Sources: Naeini et al., AAAI 2015; Guo et al., "On Calibration of Modern Neural Networks", arXiv 1706.04599.
    """
    bin_of = np.minimum((np.asarray(confidences) * bins).astype(int), bins - 1)
    gaps = np.asarray(confidences, np.float64) - np.asarray(correct, np.float64)
    return float(np.abs(np.bincount(bin_of, gaps)).sum() / len(gaps))


def _entropy_term(a: float, b: float) -> float:
    """a log(a / b), with the limit 0 at a = 0."""
    return a * math.log(a / b) if a > 0 else 0.0


def _binomial_cdf(k: int, n: int, p: float) -> float:
    """P(Bin(n, p) ≤ k). Sums the terms by their logarithms, as the binomial coefficients overflow."""
    if k >= n:
        return 1.0
    i = np.arange(k + 1)
    log_factorial = np.array([math.lgamma(i + 1) for i in range(n + 1)])
    terms = log_factorial[n] - log_factorial[i] - log_factorial[n - i] + i * math.log(p) + (n - i) * math.log1p(-p)
    return float(np.exp(terms).sum())
