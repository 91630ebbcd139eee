"""Grids: the values that numbers with a common scale may take.

Convention of ONNX and GPTQ: q = clip(round(x / S) + Z), x̂ = S * (q - Z), rounding half to even, so that zero is exact. The
other convention x̂ = S * (q + Z') has Z' = -Z (`Uniform.added`).
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np

from headrace.compress.grids.spec import E4M3, E8M0, FLOATS, NumberFormat

# Exponent bits, mantissa bits, bias, and number of highest codes that are NaN or infinite.
_MINIFLOATS = {"e4m3": (4, 3, 7, 1), "e5m2": (5, 2, 15, 4), "e2m1": (2, 1, 1, 0)}
TAIL = 0.9677083  # the outermost quantile of NF4 (QLoRA, https://arxiv.org/abs/2305.14314)


class Grid(Protocol):
    """Values for groups of numbers [groups, size]."""

    def snap(self, w: np.ndarray) -> np.ndarray:
        """The nearest value of each number, float32, same shape."""
        ...

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Least and largest value of each group [groups, 1]."""
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Integers in [low, high]: scale S float32 [groups, 1], zero point Z int32 [groups, 1]."""

    scale: np.ndarray
    zero: np.ndarray
    low: int
    high: int

    def codes(self, w: np.ndarray) -> np.ndarray:
        """Integers of numbers w: int32, same shape."""
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.where(self.scale > 0, w / self.scale, 0)
        return np.clip(np.rint(steps) + self.zero, self.low, self.high).astype(np.int32)

    def values(self, codes: np.ndarray) -> np.ndarray:
        """Numbers of integers: float32, same shape."""
        numbers: np.ndarray = self.scale * (codes - self.zero).astype(np.float32)
        return numbers

    def snap(self, w: np.ndarray) -> np.ndarray:
        return self.values(self.codes(w))

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        ends = (np.full_like(self.zero, end) for end in (self.low, self.high))
        low, high = (self.values(end) for end in ends)
        return low, high

    @property
    def added(self) -> np.ndarray:
        """Z' of the convention x̂ = S * (q + Z')."""
        return -self.zero


@dataclass(frozen=True, slots=True)
class Table:
    """Values of an ascending table, float32 [values], times a scale [groups, 1]."""

    scale: np.ndarray
    table: np.ndarray

    def snap(self, w: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.where(self.scale > 0, w / self.scale, 0)
        numbers: np.ndarray = self.scale * self.table[np.searchsorted((self.table[1:] + self.table[:-1]) / 2, steps)]
        return numbers

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        return self.scale * self.table[0], self.scale * self.table[-1]


def grouped(w: np.ndarray, group: int | None) -> np.ndarray:
    """A matrix [n, k] as [groups, numbers that share a scale]. Raises ValueError if a row is not whole groups."""
    if group is None:
        return w.reshape(1, -1)
    if group and w.shape[1] % group:
        raise ValueError(f"rows of {w.shape[1]} numbers cannot be divided into groups of {group}")
    return w.reshape(-1, group or w.shape[1])


def fit(w: np.ndarray, spec: NumberFormat) -> Grid:
    """The grid of a format for groups w [groups, size] that covers all numbers."""
    w = w.astype(np.float32, copy=False)
    if spec.family != "int":
        most = np.abs(w).max(1, keepdims=True)
        table = _table(w, most, spec)
        return Table(_scale(most, float(np.abs(table).max()), spec.scales).astype(np.float32), table)
    if spec.symmetric:
        high = 2 ** (spec.bits - 1) - 1
        scale = np.abs(w).max(1, keepdims=True) / high
        return Uniform(scale.astype(np.float32), np.zeros(scale.shape, np.int32), -high, high)
    high = 2**spec.bits - 1
    low, top = np.minimum(w.min(1, keepdims=True), 0), np.maximum(w.max(1, keepdims=True), 0)
    scale = ((top - low) / high).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = np.where(scale > 0, np.rint(-low / scale), 0).astype(np.int32)
    return Uniform(scale, zero, 0, high)


def _scale(most: np.ndarray, last: float, scales: str) -> np.ndarray:
    """Scales that map each group's largest number to the last value of a table, in the format that scales have.

    Powers of two follow OCP Microscaling Formats 1.0: larger numbers are clipped.
    """
    if scales == E8M0:
        power = np.frexp(most)[1] - np.frexp(np.float32(last))[1]
        return np.where(most > 0, np.ldexp(np.float32(1), power), 0)
    scale = most / last
    if scales == E4M3 and most.any():
        table = minifloat("e4m3")
        unit = scale.max() / table[-1]
        return Table(np.full_like(scale, unit), table).snap(scale)
    return scale


def _table(w: np.ndarray, most: np.ndarray, spec: NumberFormat) -> np.ndarray:
    if spec.family in FLOATS:
        return minifloat(spec.family)
    if spec.family == "nf":
        return normal_float()
    if spec.family == "pow":
        return powers(spec.bits)
    return lloyd(w / np.where(most > 0, most, 1), spec.bits)


def minifloat(name: str) -> np.ndarray:
    """All values of a small float format: E4M3 to 448, E5M2 to 57344 (arXiv 2209.05433), E2M1 to 6."""
    exponent_bits, mantissa_bits, bias, reserved = _MINIFLOATS[name]
    codes = np.arange(2 ** (exponent_bits + mantissa_bits) - reserved)
    exponent, mantissa = codes >> mantissa_bits, (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    values = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - bias), mantissa * 2.0 ** (1 - bias))
    return np.concatenate([-values[:0:-1], values]).astype(np.float32)


def normal_float() -> np.ndarray:
    """NF4 (QLoRA, arXiv 2305.14314): quantiles of N(0, 1), eight above zero and seven below, the outermost at ±1."""
    normal = NormalDist()

    def side(count: int) -> list[float]:
        return [normal.inv_cdf(p) for p in np.linspace(TAIL, 0.5, count + 1)[:-1]]

    values = np.array([*(-value for value in side(7)), 0.0, *reversed(side(8))])
    return (values / values.max()).astype(np.float32)


def powers(bits: int) -> np.ndarray:
    """Zero and ± powers of two down from 1; one code is unused."""
    values = 2.0 ** -np.arange(2 ** (bits - 1) - 1)
    return np.concatenate([-values, [0.0], values[::-1]]).astype(np.float32)


def lloyd(x: np.ndarray, bits: int, rounds: int = 40) -> np.ndarray:
    """2**bits values with a small squared error for numbers x, each the mean of its cell (Lloyd 1982); one of them is 0."""
    x = np.sort(x.reshape(-1).astype(np.float64))
    sums = np.concatenate([[0.0], np.cumsum(x)])
    table = np.quantile(x, (np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(rounds):
        table[np.abs(table).argmin()] = 0.0
        table.sort()
        cuts = np.concatenate([[0], np.searchsorted(x, (table[1:] + table[:-1]) / 2), [len(x)]])
        count = np.diff(cuts)
        means = np.diff(sums[cuts]) / np.maximum(count, 1)
        table = np.where((count > 0) & (table != 0), means, table)
    return np.sort(table).astype(np.float32)
