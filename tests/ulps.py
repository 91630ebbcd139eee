"""Tolerances against float32 numbers: as many units in the last place as roundings made them."""

from collections.abc import Iterable

import numpy as np


def ulps(value: float, roundings: int) -> float:
    """The most `roundings` roundings to float32 can move a number, none of which is larger than `value`, of at most one ulp
    each. A sum of negative log-probabilities is such: all partial sums are nearer to 0."""
    return roundings * float(np.spacing(np.float32(abs(value))))


def rounded_once(ours: Iterable[float], exact: Iterable[float]) -> bool:
    """Whether each number is the exact one, rounded to float32 once, its last bit aside."""
    return all(abs(a - b) <= ulps(b, 1) for a, b in zip(ours, exact, strict=True))
