"""A hidden row for each token, on the same block ids as its K and V: for contrastive search, and for heads that draft."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from headrace.data.plan import Feed, StepPlan


class Kept:
    """A row for each token, [blocks * block size, width].

    Memory is taken by `reserve`, before the first row is kept, once `afford` has let its size pass; on a CPU the operating
    system fills in only pages that are written.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size = block_size
        self._shape = (num_blocks * block_size, width)
        self._dtype, self._device = dtype, device
        self._data: torch.Tensor | None = None
        self._rows: Any = None  # the same memory to write to: numpy's where it can be, which copies a few rows sooner
        self.afford: Callable[[int], None] = lambda size: None

    def reserve(self) -> None:
        """Take the memory, where that was not done yet. Raises what `afford` does."""
        if self._data is None:
            self.afford(self._shape[0] * self._shape[1] * self._dtype.itemsize)
            self._data = self._rows = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
            if self._data.is_cpu and self._dtype == torch.float32:
                self._rows = self._data.numpy()

    @property
    def reserved(self) -> bool:
        return self._data is not None

    @property
    def bytes(self) -> int:
        return 0 if self._data is None else self._data.nbytes

    def store(self, feed: Feed, table: Sequence[int], rows: torch.Tensor | np.ndarray) -> None:
        """Keep a feed's rows [count + nodes, width], nodes at consecutive KV indices as their K and V."""
        assert self._data is not None, "memory is reserved before rows are kept"
        at = 0
        for place, count in self._runs(table, feed.start, feed.start + len(rows)):
            self._rows[place : place + count] = rows[at : at + count]
            at += count

    def read(self, table: Sequence[int], start: int, end: int) -> torch.Tensor:
        """The rows [end - start, width] of KV indices [start, end)."""
        assert self._data is not None
        parts = [self._data[place : place + count] for place, count in self._runs(table, start, end)]
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def closest(self, feed: Feed, table: Sequence[int]) -> list[float]:
        """The degeneration penalty of contrastive search (Su et al. 2022), of rows of length 1: for each of a feed's nodes, the
        largest cosine of its hidden state with those of all tokens before the nodes, the prompt's included."""
        assert self._data is not None
        count = feed.start + feed.count
        blocks = -(-(count + len(feed.nodes)) // self.block_size)
        index = torch.tensor(list(table[:blocks]), device=self._data.device)
        rows = self._data.view(-1, self.block_size, self._shape[1])[index].flatten(0, 1)
        best: list[float] = (rows[:count] @ rows[count : count + len(feed.nodes)].T).amax(0).tolist()
        return best

    def rearrange(self, plan: StepPlan) -> None:
        """Carry out the plan's moves and copies: every source is read before anything is written."""
        if self._data is None:
            return
        if plan.moves:
            moved = torch.tensor([(source, to) for _, source, to in plan.moves], device=self._data.device)
            self._data[moved[:, 1]] = self._data[moved[:, 0]]
        if plan.copies:
            copied = torch.tensor([(source, to) for _, source, to in plan.copies], device=self._data.device)
            blocks = self._data.view(-1, self.block_size, self._shape[1])
            blocks[copied[:, 1]] = blocks[copied[:, 0]]

    def _runs(self, table: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int]]:
        """Where the rows of KV indices [start, end) are, block by block: the first's place, and how many."""
        size = self.block_size
        while start < end:
            count = min(end - start, size - start % size)
            yield table[start // size] * size + start % size, count
            start += count
