"""The column loop: a matrix rounded (GPTQ, Frantar et al. 2022, https://arxiv.org/abs/2210.17323), pruned (SparseGPT, Frantar
and Alistarh 2023, https://arxiv.org/abs/2301.00774), or both at once, column by column, each column's error made good by those
after it."""

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

BLOCK = 128  # columns whose errors are spread over those behind them at once
Round = Callable[[Tensor], Tensor]  # numbers of a column [n] -> the nearest allowed values


class Grids(Protocol):
    """Which values a column may take."""

    def at(self, j: int, w: Tensor) -> Round:
        """How column j, counted in the order of the loop, is rounded; w [n, k] is the matrix of that moment in that order."""
        ...


class Keep(Protocol):
    """Which numbers of a column stay; the others become 0."""

    def at(self, j: int, w: Tensor, upper: Tensor) -> Tensor:
        """True where row i keeps its number in column j: [n]. Asked for column after column; w as for Grids."""
        ...


def reconstruct(
    w: Tensor, upper: Tensor, *, grids: Grids | None, keep: Keep | None, order: Tensor | None = None, block: int = BLOCK
) -> Tensor:
    """A matrix [n, k] with rounded or pruned columns, so chosen that its outputs change little; rows do not know each other.

    `upper` [k, k]: U of `hessian.upper`, for the same `order` (int64 [k]: which column comes when; None: as they stand).
    What a column becomes is taken from the w of that moment; its error over U[j, j] is spread by row j of U over the columns
    after it, in blocks: within a block at once, behind it when the block is done.
    """
    k = w.shape[1]
    work = (w if order is None else w[:, order]).t().contiguous()  # columns lie together
    made = torch.empty_like(work)
    now = work.t()
    for first in range(0, k, block):
        last = min(first + block, k)
        spread = torch.empty_like(work[first:last])
        for j in range(first, last):
            column = work[j]
            kept = None if keep is None else keep.at(j, now, upper)
            value = column if grids is None else grids.at(j, now)(column)
            made[j] = value if kept is None else torch.where(kept, value, torch.zeros_like(value))
            spread[j - first] = (column - made[j]) / upper[j, j]
            work[j + 1 : last].addr_(upper[j, j + 1 : last], spread[j - first], alpha=-1)
        work[last:].addmm_(upper[first:last, last:].t(), spread, alpha=-1)
    result = torch.empty_like(w)
    result[:, slice(None) if order is None else order] = made.t()
    return result


class StoredGrids:
    """The grids of a kind of stored block: scales as `encode` finds them, codes free.

    With `rows` (uint8 [n, row bytes]: a matrix stored in the kind) its scales are taken (static groups), and columns may come
    in any `order`. Without, each block's are searched when the loop comes to it, of the numbers it finds there.
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
            raise ValueError("columns in another order need scales that are there before the loop")
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
        """Scales of whole blocks of columns from `start` on."""
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
        """int64 [n] of the j-th column of the loop."""
        length = self._length[self._places[j]]
        share = torch.where(length == 0, 0.0, (column - self._first[self._places[j]]) / length)
        return torch.bucketize(share, self._middles)

    def rows(self, made: Tensor) -> tuple[np.ndarray, Tensor]:
        """What the loop made [n, k], as it stands, in stored rows; and what these say: the same but for float32's last bits."""
        codes = torch.empty(made.shape, dtype=torch.uint8)
        for j, place in enumerate(self._places):
            codes[:, place] = self._codes(j, made[:, place]).to(torch.uint8)
        rows = with_codes(self._rows, self._kind, codes.numpy())
        return rows, torch.from_numpy(dequantize_numpy(rows.reshape(-1), self._kind).reshape(made.shape))


class GroupGrids:
    """The grids of integers with a scale for a group of inputs: scales and zero points as `groups.fit` finds them, integers
    free. As StoredGrids: `fitted` says that they are there before the loop, and columns may then come in any `order`."""

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
            raise ValueError("columns in another order need scales that are there before the loop")
        n, k = shape
        self._of, self._importance, self._threads = of, importance, threads
        self._places = list(range(k)) if order is None else order.tolist()
        self._size, self._static = of.group or k, fitted is not None
        self._scale, self._zero = (torch.zeros(of.groups(k), n) for _ in range(2))
        if fitted is not None:
            self._take(fitted, 0)

    def _take(self, found: Fitted, group: int) -> None:
        last = group + found.scale.shape[1]
        self._scale[group:last] = torch.from_numpy(found.scale.T.copy())
        self._zero[group:last] = torch.from_numpy(found.zero.T.astype(np.float32))

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
        """Of a column [n]: whole numbers as float32."""
        scale, zero = self._scale[place // self._size], self._zero[place // self._size]
        least, most = self._of.range
        low, high = (least - zero, most - zero) if self._of.symmetric else (-zero, most - zero)
        steps = torch.where(scale == 0, 0.0, column / scale).round()
        return torch.minimum(torch.maximum(steps, low), high)

    def rows(self, made: Tensor) -> tuple[np.ndarray, Tensor]:
        """As StoredGrids.rows."""
        integers = torch.empty(made.shape, dtype=torch.int8)
        for place in range(made.shape[1]):
            integers[:, place] = self._integers(place, made[:, place]).to(torch.int8)
        rows = stored(self._of, self._scale.T.numpy(), integers.numpy())
        return rows, torch.from_numpy(dequantize_numpy(rows.reshape(-1), self._of.kind).reshape(made.shape))
