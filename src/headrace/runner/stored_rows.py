"""One stored hidden row per token, on the same block ids as its K/V: for contrastive search, heads and exits."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from headrace.data.plan import Feed, StepPlan, pairs_of

Rows = Any  # [n, width], of a back end's own type: tensors, arrays


class StoredRows(ABC):
    """A store of rows [blocks * block size, width]; a back end implements it.

    `reserve` allocates it before the first row, once `afford` has accepted its size in bytes. On a CPU the operating system
    takes only the pages that are written.
    """

    def __init__(self, num_blocks: int, block_size: int, width: int, itemsize: int) -> None:
        self.block_size = block_size
        self.shape = (num_blocks * block_size, width)
        self.itemsize = itemsize
        self.data: Rows = None
        self.afford: Callable[[int], None] = lambda size: None

    @abstractmethod
    def allocate(self) -> Rows:
        """Zeros of `shape`."""

    @abstractmethod
    def join(self, parts: list[Rows]) -> Rows:
        """Concatenate rows."""

    @abstractmethod
    def unit(self, rows: Rows) -> Rows:
        """Rows scaled to length 1."""

    @abstractmethod
    def nearest(self, rows: Rows, nodes: Rows) -> list[float]:
        """For each node [n, width] its largest product with one of the rows [r, width]."""

    def reserve(self) -> None:
        """Allocate the store, if that was not done yet. Raises what `afford` raises."""
        if self.data is None:
            self.afford(self._size())
            self.data = self.allocate()

    @property
    def reserved(self) -> bool:
        return self.data is not None

    @property
    def bytes(self) -> int:
        return 0 if self.data is None else self._size()

    def store(self, feed: Feed, table: Sequence[int], rows: Rows) -> None:
        """Store a feed's rows [count + nodes, width], nodes at consecutive KV indices like their K/V."""
        assert self.data is not None, "memory is reserved before rows are kept"
        at = 0
        for place, count in self._runs(table, feed.start, feed.start + len(rows)):
            self.data[place : place + count] = rows[at : at + count]
            at += count

    def read(self, table: Sequence[int], start: int, end: int) -> Rows:
        """The rows [end - start, width] of KV indices [start, end)."""
        assert self.data is not None
        parts = [self.data[place : place + count] for place, count in self._runs(table, start, end)]
        return parts[0] if len(parts) == 1 else self.join(parts or [self.data[:0]])

    def closest(self, feed: Feed, table: Sequence[int]) -> list[float]:
        """For each of a feed's nodes, the largest cosine of its hidden state with those of all tokens before the nodes, the
        prompt's included. Rows must have length 1.

        Source: the degeneration penalty of Su et al., "A Contrastive Framework for Neural Text Generation", arXiv 2202.06417.
        """
        count = feed.start + feed.count
        end = count + len(feed.nodes)
        blocks = self.by_block()[list(table[: -(-end // self.block_size)])]
        rows = blocks.reshape(-1, self.shape[1])
        return self.nearest(rows[:count], rows[count:end])

    def rearrange(self, plan: StepPlan) -> None:
        """Carry out the plan's moves and copies: all sources are read before anything is written."""
        if self.data is None:
            return
        if moves := pairs_of(plan.moves, 0):
            self.data[[to for _, to in moves]] = self.data[[source for source, _ in moves]]
        if copies := pairs_of(plan.copies, 0):
            blocks = self.by_block()
            blocks[[to for _, to in copies]] = blocks[[source for source, _ in copies]]

    def by_block(self) -> Rows:
        """The rows [blocks, block size, width], the same memory."""
        return self.data.reshape(-1, self.block_size, self.shape[1])

    def block_bytes(self) -> int:
        """Bytes of the rows of one block."""
        return self.block_size * self.shape[1] * self.itemsize

    @abstractmethod
    def read_blocks(self, blocks: Sequence[int], out: np.ndarray) -> None:
        """Copy the rows of whole blocks into `out`, uint8."""

    @abstractmethod
    def write_blocks(self, blocks: Sequence[int], data: np.ndarray) -> None:
        """Copy the rows of whole blocks from `data`, uint8."""

    def _size(self) -> int:
        return self.shape[0] * self.shape[1] * self.itemsize

    def _runs(self, table: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int]]:
        """The runs of consecutive rows of KV indices [start, end): first row and count, block by block."""
        size = self.block_size
        while start < end:
            count = min(end - start, size - start % size)
            yield table[start // size] * size + start % size, count
            start += count
