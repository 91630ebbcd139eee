"""The column loop: round (GPTQ, Frantar et al. 2022, arXiv 2210.17323) or prune (SparseGPT, Frantar and Alistarh 2023, arXiv
2301.00774) a matrix column by column; later columns compensate each column's error.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.compress.grids.codes import ends, steps, with_codes
from headrace.compress.grids.encode import encode
from headrace.compress.grids.groups import Fitted, fit, stored
from headrace.weights.decode import dequantize_numpy
from headrace.weights.kinds import KINDS
from headrace.weights.schemes.base import IntegerFormat

BLOCK = 128  # columns whose errors are applied to later columns at a time
Round = Callable[[Tensor], Tensor]  # numbers of a column [n] -> the nearest allowed values


class Grids(Protocol):
    """Allowed values of each column."""

    def at(self, j: int, w: Tensor) -> Round:
        """Rounding function of column j in loop order. w: current weights [n, k] in that order."""
        ...


class Keep(Protocol):
    """Weights to keep in each column; the others become 0."""

    def at(self, j: int, w: Tensor, upper: Tensor) -> Tensor:
        """bool [n]: rows that keep their weight in column j. Called for column after column; w as for Grids."""
        ...


def reconstruct(
    w: Tensor, upper: Tensor, *, grids: Grids | None, keep: Keep | None, order: Tensor | None = None, block: int = BLOCK
) -> Tensor:
    """Round or prune the columns of a matrix [n, k] so that its outputs change little; rows are independent.

    upper: [k, k], U of `hessian.inverse_factor` for the same order. order: int64 [k], columns in loop order (None: their own).
    A column's error over U[j, j] is applied to the columns after it by row j of U: at once within a block, behind the block
    when it is finished.
    """
    k = w.shape[1]
    work = (w if order is None else w[:, order]).t().contiguous()  # columns are contiguous
    rounded = torch.empty_like(work)
    current = work.t()
    for first in range(0, k, block):
        last = min(first + block, k)
        spread = torch.empty_like(work[first:last])
        for j in range(first, last):
            column = work[j]
            kept = None if keep is None else keep.at(j, current, upper)
            value = column if grids is None else grids.at(j, current)(column)
            rounded[j] = value if kept is None else torch.where(kept, value, torch.zeros_like(value))
            spread[j - first] = (column - rounded[j]) / upper[j, j]
            work[j + 1 : last].addr_(upper[j, j + 1 : last], spread[j - first], alpha=-1)
        work[last:].addmm_(upper[first:last, last:].t(), spread, alpha=-1)
    result = torch.empty_like(w)
    result[:, slice(None) if order is None else order] = rounded.t()
    return result


class StoredGrids:
    """Grids of a GGUF kind: scales as `encode` finds them, free codes.

    rows: the matrix in that kind, uint8 [n, row bytes]; its scales are used (static groups), and columns may come in any order.
    Without rows each block's scales are searched when the loop reaches it.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        kind: str,
        importance: np.ndarray | None = None,
        *,
        rows: np.ndarray | None = None,
        order: Tensor | None = None,
        threads: int = 1,
    ) -> None:
        if order is not None and rows is None:
            raise ValueError("act-order needs scales that are computed before the loop")
        (n, k), (block, nbytes) = shape, KINDS[kind]
        self._kind, self._importance, self._threads = kind, importance, threads
        self._places = list(range(k)) if order is None else order.tolist()
        self._static = rows is not None
        self._steps = torch.from_numpy(steps(kind))
        self._middles = (self._steps[1:] + self._steps[:-1]) / 2
        self._first, self._length = torch.empty(k, n), torch.empty(k, n)
        self._rows = np.empty((n, k // block * nbytes), np.uint8)
        if rows is not None:
            self._take(rows, 0)

    def _fit(self, w: np.ndarray, start: int) -> None:
        """Search scales of whole blocks of columns from `start` on."""
        importance = None if self._importance is None else self._importance[start : start + w.shape[1]]
        if importance is not None and not importance.any():
            importance = None
        self._take(encode(np.ascontiguousarray(w), self._kind, importance, self._threads), start)

    def _take(self, rows: np.ndarray, start: int) -> None:
        block, nbytes = KINDS[self._kind]
        at = start // block * nbytes
        self._rows[:, at : at + rows.shape[1]] = rows
        first, last = ends(rows, self._kind)
        stop = start + first.shape[1]
        self._first[start:stop] = torch.from_numpy(first.T)
        self._length[start:stop] = torch.from_numpy((last - first).T)

    def at(self, j: int, w: Tensor) -> Round:
        span = KINDS[self._kind].block
        if not self._static and j % span == 0:
            self._fit(w[:, j : j + span].numpy(), j)
        return lambda column: self._first[self._places[j]] + self._length[self._places[j]] * self._steps[self._codes(j, column)]

    def _codes(self, j: int, column: Tensor) -> Tensor:
        """Codes int64 [n] of the j-th column of the loop."""
        length = self._length[self._places[j]]
        share = torch.where(length == 0, 0.0, (column - self._first[self._places[j]]) / length)
        return torch.bucketize(share, self._middles)

    def rows(self, rounded: Tensor) -> tuple[np.ndarray, Tensor]:
        """The loop's result [n, k] as stored rows, and their values: equal but for the last bits of float32."""
        codes = torch.empty(rounded.shape, dtype=torch.uint8)
        for j, place in enumerate(self._places):
            codes[:, place] = self._codes(j, rounded[:, place]).to(torch.uint8)
        rows = with_codes(self._rows, self._kind, codes.numpy())
        return rows, torch.from_numpy(dequantize_numpy(rows.reshape(-1), self._kind).reshape(rounded.shape))


class GroupGrids:
    """Grids of integer groups: scales and zero points as `groups.fit` finds them, free integers. fitted: found before the loop,
    so that columns may come in any order; else as for StoredGrids.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        of: IntegerFormat,
        importance: np.ndarray | None = None,
        *,
        fitted: Fitted | None = None,
        order: Tensor | None = None,
        threads: int = 1,
    ) -> None:
        if order is not None and fitted is None:
            raise ValueError("act-order needs scales that are computed before the loop")
        n, k = shape
        self._of, self._importance, self._threads = of, importance, threads
        self._places = list(range(k)) if order is None else order.tolist()
        self._size, self._static = of.group or k, fitted is not None
        self._scale, self._zero = (torch.zeros(of.groups(k), n) for _ in range(2))
        if fitted is not None:
            self._take(fitted, 0)

    def _take(self, fitted: Fitted, group: int) -> None:
        last = group + fitted.scale.shape[1]
        self._scale[group:last] = torch.from_numpy(fitted.scale.T.copy())
        self._zero[group:last] = torch.from_numpy(fitted.zero.T.astype(np.float32))

    def at(self, j: int, w: Tensor) -> Round:
        if not self._static and j % self._size == 0:
            last = j + self._size
            importance = None if self._importance is None else self._importance[j:last]
            if importance is not None and not importance.any():
                importance = None
            group = replace(self._of, group=self._size)
            self._take(fit(np.ascontiguousarray(w[:, j:last].numpy()), group, importance, self._threads), j // self._size)
        place = self._places[j]
        return lambda column: self._scale[place // self._size] * self._integers(place, column)

    def _integers(self, place: int, column: Tensor) -> Tensor:
        """Integers of a column [n], as float32."""
        scale, zero = self._scale[place // self._size], self._zero[place // self._size]
        least, most = self._of.range
        low, high = (least - zero, most - zero) if self._of.symmetric else (-zero, most - zero)
        steps = torch.where(scale == 0, 0.0, column / scale).round()
        return torch.minimum(torch.maximum(steps, low), high)

    def rows(self, rounded: Tensor) -> tuple[np.ndarray, Tensor]:
        """As StoredGrids.rows."""
        integers = torch.empty(rounded.shape, dtype=torch.int8)
        for place in range(rounded.shape[1]):
            integers[:, place] = self._integers(place, rounded[:, place]).to(torch.int8)
        rows = stored(self._of, self._scale.T.numpy(), integers.numpy())
        return rows, torch.from_numpy(dequantize_numpy(rows.reshape(-1), self._of.kind).reshape(rounded.shape))
