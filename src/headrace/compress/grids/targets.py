"""Formats that methods round a matrix to: a GGUF kind ("Q4_K"), integers of a folder ("int4-g128"), small floats ("mxfp4",
"nvfp4").
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.compress.grids.codes import CODES, TABLES, ends
from headrace.compress.grids.encode import WRITTEN, encode
from headrace.compress.grids.groups import fit, stored
from headrace.compress.grids.loop import Grids, GroupGrids, StoredGrids
from headrace.compress.grids.nvfp4 import Nvfp4
from headrace.compress.grids.spec import integers_named
from headrace.weights.decode import dequantize_numpy
from headrace.weights.schemes.base import IntegerFormat
from headrace.weights.schemes.rows import row_integers
from headrace.weights.schemes.small_floats import MXFP4, NVFP4


class RowGrids(Grids, Protocol):
    """Grids that can store the loop's result."""

    def rows(self, rounded: Tensor) -> tuple[np.ndarray, Tensor]:
        """Stored rows of a matrix [n, k] whose numbers are on the grids, and their values."""
        ...


class Target(Protocol):
    """A format; see the module."""

    @property
    def kind(self) -> str:
        """Kind of the stored rows (weights.kinds)."""
        ...

    def encode(self, w: np.ndarray, importance: np.ndarray | None = None, threads: int = 1) -> np.ndarray:
        """Round rows float32 [n, k] to nearest: uint8 [n, row bytes]. Raises ValueError as grids.encode does."""
        ...

    @property
    def by_row(self) -> bool:
        """True if a row's bytes depend on that row alone, so that rows can be encoded in slices."""
        ...

    def grids(
        self, w: np.ndarray, importance: np.ndarray | None, *, rows: np.ndarray | None, order: Tensor | None, threads: int
    ) -> RowGrids:
        """Grids for the column loop over w. rows: result of `encode`; its scales are used, with columns in `order`."""
        ...

    @property
    def steps(self) -> int:
        """Number of even steps between the least and the largest value of a block or group; 0 if uneven."""
        ...

    def ends(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Least and largest value at each place of stored rows: float32 [n, k] each."""
        ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a GGUF kind."""

    kind: str
    by_row = True

    def encode(self, w: np.ndarray, importance: np.ndarray | None = None, threads: int = 1) -> np.ndarray:
        return encode(w, self.kind, importance, threads)

    def grids(
        self, w: np.ndarray, importance: np.ndarray | None, *, rows: np.ndarray | None, order: Tensor | None, threads: int
    ) -> RowGrids:
        return StoredGrids((w.shape[0], w.shape[1]), self.kind, importance, rows=rows, order=order, threads=threads)

    @property
    def steps(self) -> int:
        return 0 if self.kind in TABLES else CODES[self.kind][2] - 1

    def ends(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        limits = ends(rows, self.kind)
        return np.minimum(*limits), np.maximum(*limits)


@dataclass(frozen=True, slots=True)
class Groups:
    """Integers with one scale for a group."""

    integers: IntegerFormat
    by_row = True

    @property
    def kind(self) -> str:
        return self.integers.kind

    def encode(self, w: np.ndarray, importance: np.ndarray | None = None, threads: int = 1) -> np.ndarray:
        fitted = fit(w, self.integers, importance, threads)
        return stored(self.integers, fitted.scale, fitted.integers)

    def grids(
        self, w: np.ndarray, importance: np.ndarray | None, *, rows: np.ndarray | None, order: Tensor | None, threads: int
    ) -> RowGrids:
        fitted = None if rows is None else fit(w, self.integers, importance, threads)
        shape = (w.shape[0], w.shape[1])
        return GroupGrids(shape, self.integers, importance, fitted=fitted, order=order, threads=threads)

    @property
    def steps(self) -> int:
        low, high = self.integers.range
        return high - low if self.integers.symmetric else (1 << self.integers.bits) - 1

    def ends(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A group's zero point is taken as the least possible one, as it is written."""
        of = self.integers
        values, scales = row_integers(of.kind, rows)
        n, k = values.shape
        groups = of.groups(k)
        least = of.range[0] if of.symmetric else np.minimum(values.reshape(n, groups, -1).min(2), 0).astype(np.float32)
        scale = scales.reshape(n, groups, -1)[:, :, 0].astype(np.float32)
        limits = [np.repeat(scale * end, k // groups, axis=1) for end in (least, least + self.steps)]
        return np.minimum(*limits), np.maximum(*limits)


def target(name: str) -> Target:
    """The format by its name. Raises ValueError as `integers_named` does."""
    if name in WRITTEN:
        return Blocks(name)
    if name == MXFP4:
        return Blocks("MXFP4")
    return Nvfp4() if name == NVFP4 else Groups(integers_named(name))


def nearest(w: Tensor, to: Target, importance: np.ndarray | None, threads: int) -> tuple[np.ndarray, Tensor]:
    """Round to nearest: stored rows, and their values."""
    rows = to.encode(w.numpy(), importance, threads)
    return rows, torch.from_numpy(dequantize_numpy(rows.reshape(-1), to.kind).reshape(w.shape))
