"""NVFP4 as a grid: a number is E2M1 times the E4M3 scale of its group (16 columns of a row) times a power of two, which the
matrix has once.

Results are float32 rows of such numbers; weights.schemes.small_floats stores them as codes and scales.
"""

import numpy as np
import torch
from torch import Tensor

from headrace.compress.grids.codes import TABLES
from headrace.compress.grids.encode import CHUNK, columns, map_slices
from headrace.compress.grids.loop import Round
from headrace.compress.grids.search import Array, error, keep_better
from headrace.weights.schemes.small_floats import E4M3, GROUPS, NVFP4, nvfp4_parts

GROUP = GROUPS[NVFP4]
VALUES = TABLES["MXFP4"] / 2  # E2M1, ascending
MIDDLES = (VALUES[1:] + VALUES[:-1]) / 2  # where rounding to E2M1 changes
BETWEEN = (E4M3[1:] + E4M3[:-1]) / 2  # where rounding to E4M3 changes
ENDS = (6.0, 5.0, 4.0, 7.0, 8.0)  # tried: largest number of a group over its scale; numbers beyond 6 are clipped


class Nvfp4:
    """A `targets.Target`. The power of two is that of the matrix's largest number."""

    kind, steps, by_row = "F32", 0, False

    def encode(self, w: Array, importance: Array | None = None, threads: int = 1) -> Array:
        """Round to nearest: float32 as bytes, uint8 [n, 4 * k]. Raises ValueError as grids.encode does."""
        scale, rounded = fit(w, unit_of(w), importance, threads), np.empty(w.shape, np.float32)
        step = max(1, CHUNK // w.shape[1])
        for at in range(0, len(w), step):
            each = scale[at : at + step, :, None]
            some = w[at : at + step].reshape(*each.shape[:2], GROUP)
            rounded[at : at + step] = (each * VALUES[np.searchsorted(MIDDLES, some / each)]).reshape(-1, w.shape[1])
        return rounded.view(np.uint8)

    def grids(
        self, w: Array, importance: Array | None, *, rows: Array | None, order: Tensor | None, threads: int
    ) -> "Nvfp4Grids":
        return Nvfp4Grids(w, importance, static=rows is not None, order=order, threads=threads)

    def ends(self, rows: Array) -> tuple[Array, Array]:
        values = rows.view("<f4")
        _, codes, whole = nvfp4_parts(values)
        most = np.repeat(E4M3[codes] / whole * VALUES[-1], GROUP, axis=1)
        return -most, most


class Nvfp4Grids:
    """Grids of a matrix float32 [n, k] for the column loop. static: scales are found before the loop, so that columns may come
    in any `order`; otherwise when the loop reaches a group.
    """

    def __init__(self, w: Array, importance: Array | None, *, static: bool, order: Tensor | None, threads: int) -> None:
        if order is not None and not static:
            raise ValueError("act-order needs scales that are computed before the loop")
        n, k = w.shape
        self._importance, self._threads, self._static, self._unit = importance, threads, static, unit_of(w)
        self._places = list(range(k)) if order is None else order.tolist()
        self._scale = torch.ones(k // GROUP, n)
        self._values, self._middles = torch.from_numpy(VALUES), torch.from_numpy(MIDDLES)
        if static:
            self._scale = torch.from_numpy(fit(w, self._unit, importance, threads).T.copy())

    def at(self, j: int, w: Tensor) -> Round:
        if not self._static and j % GROUP == 0:
            importance = None if self._importance is None else self._importance[j : j + GROUP]
            if importance is not None and not importance.any():
                importance = None
            group = np.ascontiguousarray(w[:, j : j + GROUP].numpy())
            self._scale[j // GROUP] = torch.from_numpy(fit(group, self._unit, importance, self._threads)[:, 0])
        scale = self._scale[self._places[j] // GROUP]
        return lambda column: scale * self._values[torch.bucketize(column / scale, self._middles)]

    def rows(self, rounded: Tensor) -> tuple[Array, Tensor]:
        """The loop's result [n, k] is stored as is."""
        return np.ascontiguousarray(rounded.numpy()).view(np.uint8), rounded


def unit_of(w: Array) -> np.float32:
    """The power of two of a matrix. The largest scale is at most half of E4M3's maximum: it may grow in the column loop."""
    power = np.frexp(np.abs(w).max() / (VALUES[-1] * E4M3[-1]))[1]
    return np.ldexp(np.float32(1), power + 1)


def fit(w: Array, unit: np.float32, importance: Array | None = None, threads: int = 1) -> Array:
    """Scale of each group, float32 [n, groups], E4M3 * unit, above 0: of those tried the one with the least squared error,
    weighted by the importance [k] of the columns.

    Raises ValueError if rows are not whole groups, or numbers are not finite.
    """
    k = w.shape[1]
    if k % GROUP:
        raise ValueError(f"rows of {k} numbers cannot be divided into groups of {GROUP}")
    return np.concatenate(map_slices(w, importance, threads, lambda rows: _fit(rows, unit, importance)))


def _fit(w: Array, unit: np.float32, importance: Array | None) -> Array:
    x, weight = columns(w, GROUP, importance)
    top = np.abs(x).max(0)
    best = [np.full_like(top, unit), np.full_like(top, np.inf)]
    for end in ENDS:
        scale = E4M3[np.maximum(np.searchsorted(BETWEEN, top / (np.float32(end) * unit)), 1)] * unit
        best = keep_better(best, [scale, error(x, scale * VALUES[np.searchsorted(MIDDLES, x / scale)], weight)])
    return best[0][: w.size // GROUP].reshape(len(w), -1)
