"""Adapters (LoRA): two small matrices for each adapted part of a model. `startup.adapters` reads them.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class LowRank:
    """The matrices of one part of a linear layer: its outputs get up.T @ (down @ x).

    down: [rank, in] float32. up: [rank, out] float64, times the adapter's scale.
    """

    down: np.ndarray
    up: np.ndarray

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a model.

    layers: by path of the linear layer ("layers.3.qkv"), its parts by name ("q"; "" for a layer of one part). stored: the same
    by stored matrix of the base, in its order of rows. transposed: such matrices are [in, out] (GPT-2). digest: SHA-256 of all
    numbers and tensors.
    """

    name: str
    path: Path
    layers: Mapping[str, Mapping[str, LowRank]]
    stored: Mapping[str, LowRank]
    transposed: bool
    digest: bytes

    @property
    def bytes(self) -> int:
        """Bytes of its matrices in bfloat16."""
        return sum(2 * (part.down.size + part.up.size) for parts in self.layers.values() for part in parts.values())


def numbers_of(adapters: Sequence[Adapter]) -> dict[str, int]:
    """Number of each adapter by name; 0 is the base."""
    return {adapter.name: number for number, adapter in enumerate(adapters, 1)}
