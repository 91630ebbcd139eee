"""Which weights of a column the column loop (quant.loop) keeps: by a mask made before it, or while it runs (SparseGPT)."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.compress.grids.keep import Sparsity, keep_mask, obs


@dataclass(frozen=True, slots=True)
class KeptMask:
    """A mask [n, k] that was made beforehand, for a column loop that takes columns in `order` (None: as they stand)."""

    mask: np.ndarray
    order: Tensor | None = None

    def at(self, j: int, w: Tensor, upper: Tensor) -> Tensor:
        """bool [n]: as KeptBlocks."""
        return torch.from_numpy(self.mask[:, j if self.order is None else int(self.order[j])])


@dataclass(slots=True)
class KeptBlocks:
    """Chooses for the column loop (quant.loop), which changes the weights as it goes: at the first column of `block` neighbours
    (of n:m, of these) their mask is made of the OBS scores of that moment. Blocks of the loop must be whole blocks of these.
    The next matrix needs another one."""

    sparsity: Sparsity
    block: int = 128
    _start: int = field(default=-1, init=False)
    _mask: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool), init=False)

    def at(self, j: int, w: Tensor, upper: Tensor) -> Tensor:
        """bool [n]: whether each row keeps its weight of column j. w [n, k] as it stands; upper [k, k].

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
