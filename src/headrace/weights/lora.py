"""Adapters (LoRA): two small matrices for each adapted part of a model. `startup.adapters` reads them.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.weights.bits import bfloat16_bits


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

    def bits(self) -> tuple[np.ndarray, np.ndarray]:
        """down [rank, in] and up [rank, out] as the bits of bfloat16, uint16."""
        return bfloat16_bits(self.down), bfloat16_bits(self.up)


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


def adapted_parts(
    adapters: Sequence[Adapter], path: str, parts: Sequence[tuple[str, int]]
) -> tuple[list[tuple[int, int, list[tuple[np.ndarray, np.ndarray] | None]]], int]:
    """Parts of a linear layer's output that adapters change, and the sum of their largest ranks.

    parts: name and width of the parts, in the order of the output's columns. Each part is (first column, width, matrices), with
    down [rank, in] and up [rank, width] as the bits of bfloat16 for each adapter, or None.
    """
    layers = [adapter.layers.get(path, {}) for adapter in adapters]
    found, column, ranks = [], 0, 0
    for name, width in parts:
        pairs = [layer.get(name) for layer in layers]
        if rank := max((pair.rank for pair in pairs if pair is not None), default=0):
            found.append((column, width, [None if pair is None else pair.bits() for pair in pairs]))
            ranks += rank
        column += width
    return found, ranks


def numbers_of(adapters: Sequence[Adapter]) -> dict[str, int]:
    """Number of each adapter by name; 0 is the base."""
    return {adapter.name: number for number, adapter in enumerate(adapters, 1)}
