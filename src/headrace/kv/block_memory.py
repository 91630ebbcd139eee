"""Whole blocks of the device's pools as bytes, by KV group: what the K/V store saves and loads."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class BlockPart(Protocol):
    """A pool, or a store of rows, on the block ids of the KV cache."""

    def block_bytes(self) -> int:
        """Bytes of one block."""

    def read_blocks(self, blocks: Sequence[int], out: np.ndarray) -> None:
        """Copy blocks into `out` [blocks * block_bytes] uint8. Another thread may run steps that do not write these blocks."""

    def write_blocks(self, blocks: Sequence[int], data: np.ndarray) -> None:
        """Copy blocks from `data` [blocks * block_bytes] uint8. No step runs meanwhile."""


class BlockMemory:
    """The parts that hold the KV groups of a model and of the models next to it. parts: by group; None: its blocks are not
    saved."""

    def __init__(self, parts: Sequence[BlockPart | None]) -> None:
        self._parts = parts
        self.groups = sum(1 << group for group, part in enumerate(parts) if part is not None)

    def parts(self, groups: int) -> list[BlockPart]:
        """The parts of the groups of a bit mask, each once."""
        chosen = (part for group, part in enumerate(self._parts) if part is not None and groups >> group & 1)
        return list(dict.fromkeys(chosen))

    def sizes(self, groups: int) -> list[int]:
        """Bytes of one block in each part."""
        return [part.block_bytes() for part in self.parts(groups)]

    def read(self, groups: int, blocks: Sequence[int]) -> np.ndarray:
        """Bytes of blocks, part after part."""
        data, at = np.empty(len(blocks) * sum(self.sizes(groups)), np.uint8), 0
        for part in self.parts(groups):
            size = len(blocks) * part.block_bytes()
            part.read_blocks(blocks, data[at : at + size])
            at += size
        return data

    def write(self, groups: int, blocks: Sequence[int | None], data: np.ndarray) -> None:
        """Copy bytes of blocks into the pools. None: the block is left out."""
        chosen, at = [block for block in blocks if block is not None], 0
        for part in self.parts(groups):
            size = part.block_bytes()
            rows = data[at : at + len(blocks) * size].reshape(len(blocks), size)
            if len(chosen) < len(blocks):
                rows = rows[[block is not None for block in blocks]]
            part.write_blocks(chosen, rows.reshape(-1))
            at += len(blocks) * size
