"""Pruning masks for the column loop (grids.loop): made beforehand, or while it runs (SparseGPT, arXiv 2301.00774)."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.compress.grids.keep import Sparsity, keep_mask, obs


@dataclass(frozen=True, slots=True)
class KeptMask:
    """A mask [n, k] made beforehand, for a loop that takes columns in `order` (None: in their own)."""

    mask: np.ndarray
    order: Tensor | None = None

    def at(self, j: int, w: Tensor, upper: Tensor) -> Tensor:
        """As KeptBlocks.at."""
        return torch.from_numpy(self.mask[:, j if self.order is None else int(self.order[j])])


@dataclass(slots=True)
class KeptBlocks:
    """Masks made in the loop: at the first of `block` neighbouring columns (for n:m, of m) from the OBS scores of the weights
    at that moment. The loop's blocks must be whole blocks of these. One instance serves one matrix.
    """

    sparsity: Sparsity
    block: int = 128
    _start: int = field(default=-1, init=False)
    _mask: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool), init=False)

    def at(self, j: int, w: Tensor, upper: Tensor) -> Tensor:
        """Rows that keep their weight in column j: bool [n]. w: current weights [n, k]. upper: [k, k].

        Raises ValueError as `keep_mask` does.
        """
        step = self.sparsity.of or self.block
        start = j - j % step
        if start != self._start:
            if j != start:
                raise ValueError(f"column {j} comes before the first of its {step}")
            now, diagonal = w[:, start : start + step].numpy(), upper.diagonal()[start : start + step].numpy()
            self._start, self._mask = start, keep_mask(obs(now, diagonal), self.sparsity, start)
        return torch.from_numpy(self._mask[:, j - start])
