"""Rounding error of a format: squared error, split into rounding and clipping, next to that of uniformly distributed errors."""

import math
from dataclasses import dataclass

import numpy as np

from headrace.compress.grids.grid import Uniform, fit, grouped
from headrace.compress.grids.spec import NumberFormat
from headrace.compress.grids.targets import Blocks, Target, target
from headrace.weights.decode import dequantize_numpy
from headrace.weights.kinds import FLOATS

SLICE = 256  # rows
Ends = np.ndarray | np.float32


@dataclass(frozen=True, slots=True)
class ErrorParts:
    """Mean squares over all numbers. rounding: inside their group's range; clipping: outside; noise: S²/12 for steps S (0 if
    uneven); sqnr: signal-to-noise ratio in dB.
    """

    rounding: float
    clipping: float
    noise: float
    sqnr: float

    @property
    def square(self) -> float:
        """Mean squared error."""
        return self.rounding + self.clipping


def measure(w: np.ndarray, spec: NumberFormat, importance: np.ndarray | None = None) -> ErrorParts:
    """Error of a format on a matrix float32 [n, k]: as `compress` writes it, if it is a format of files or folders.

    importance: as `encode` takes it.
    """
    if (to := written_target(spec)) is not None:
        return _as_written(w, to, importance)
    groups = grouped(w, spec.group)
    grid = fit(groups, spec)
    step = grid.scale if isinstance(grid, Uniform) else np.zeros(1, np.float32)
    return split(groups, grid.snap(groups), *grid.bounds(), step)


def split(w: np.ndarray, rounded: np.ndarray, low: Ends, high: Ends, step: np.ndarray) -> ErrorParts:
    """Error of numbers w that became `made`. low, high: ends of their ranges; step: their steps. Shapes broadcast."""
    squares = np.square(w.astype(np.float64) - rounded)
    outside = (w < low) | (w > high)
    clipping = float(np.where(outside, squares, 0).mean())
    whole, energy = float(squares.mean()), float(np.square(w.astype(np.float64)).mean())
    sqnr = 10 * math.log10(energy / whole) if whole and energy else math.inf
    return ErrorParts(whole - clipping, clipping, float(np.square(step.astype(np.float64)).mean() / 12), sqnr)


def outside(w: np.ndarray, rounded: np.ndarray, rows: np.ndarray, to: Target) -> tuple[float, float]:
    """Sums over numbers w [n, k] that became `made`, stored as `rows`: squared errors outside the range of their block or
    group, and S²/12 of its step. Computed in slices of rows.
    """
    clipping, noise = 0.0, 0.0
    for at in range(0, len(w), SLICE):
        some = slice(at, at + SLICE)
        low, high = to.ends(rows[some])
        error = split(w[some], rounded[some], low, high, _step(to, low, high))
        clipping, noise = clipping + error.clipping * low.size, noise + error.noise * low.size
    return clipping, noise


def written_target(spec: NumberFormat) -> Target | None:
    """The format as GGUF files or folders hold it; None if neither does."""
    if spec.family == "kind":
        return Blocks(spec.kind)
    if (spec.bits, spec.symmetric) == (8, False):
        return None  # "int8" of folders has no zero points
    try:
        return target(str(spec))
    except ValueError:
        return None


def _as_written(w: np.ndarray, to: Target, importance: np.ndarray | None) -> ErrorParts:
    rows = to.encode(w, importance)
    values = dequantize_numpy(rows.reshape(-1), to.kind).reshape(w.shape)
    if to.kind in FLOATS:
        return split(w, values, np.float32(-np.inf), np.float32(np.inf), np.zeros(1))
    low, high = to.ends(rows)
    return split(w, values, low, high, _step(to, low, high))


def _step(to: Target, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return (high - low) / to.steps if to.steps else np.zeros(1)
