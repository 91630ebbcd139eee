"""A hidden row for each token, on the same block ids as its K and V: for contrastive search, and for heads that draft."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.data.plan import Feed, StepPlan

Rows = Any  # [n, width], of the back end's own kind: tensors, arrays


class Kept(ABC):
    """A row for each token, [blocks * block size, width]; a back end says of what.

    Memory is taken by `reserve`, before the first row is kept, once `afford` has let its size pass; on a CPU the operating
    system fills in only pages that are written.
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
        """Rows of several places, one after the other."""

    @abstractmethod
    def unit(self, rows: Rows) -> Rows:
        """Rows scaled to length 1."""

    @abstractmethod
    def nearest(self, rows: Rows, nodes: Rows) -> list[float]:
        """For each of the nodes [n, width] its largest product with one of the rows [r, width]."""

    def reserve(self) -> None:
        """Take the memory, where that was not done yet. Raises what `afford` does."""
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
        """Keep a feed's rows [count + nodes, width], nodes at consecutive KV indices as their K and V."""
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
        """The degeneration penalty of contrastive search (Su et al. 2022), of rows of length 1: for each of a feed's nodes, the
        largest cosine of its hidden state with those of all tokens before the nodes, the prompt's included."""
        count = feed.start + feed.count
        end = count + len(feed.nodes)
        blocks = self.data.reshape(-1, self.block_size, self.shape[1])[list(table[: -(-end // self.block_size)])]
        rows = blocks.reshape(-1, self.shape[1])
        return self.nearest(rows[:count], rows[count:end])

    def rearrange(self, plan: StepPlan) -> None:
        """Carry out the plan's moves and copies: every source is read before anything is written."""
        if self.data is None:
            return
        if plan.moves:
            self.data[[to for _, _, to in plan.moves]] = self.data[[source for _, source, _ in plan.moves]]
        if plan.copies:
            blocks = self.data.reshape(-1, self.block_size, self.shape[1])  # the same memory
            blocks[[to for _, _, to in plan.copies]] = blocks[[source for _, source, _ in plan.copies]]

    def _size(self) -> int:
        return self.shape[0] * self.shape[1] * self.itemsize

    def _runs(self, table: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int]]:
        """Where the rows of KV indices [start, end) are, block by block: the first's place, and how many."""
        size = self.block_size
        while start < end:
            count = min(end - start, size - start % size)
            yield table[start // size] * size + start % size, count
            start += count
