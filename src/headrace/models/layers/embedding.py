"""Embedding: a table of rows by id. Tied models use the same table as the head's linear."""

import math

import numpy as np

from headrace.models.layers.holder import Allocator, Holder, ParamSpec, Tensor
from headrace.models.layers.linear import LinearMethod


class Embedding(Holder):
    """`weight` [count, width]: token rows, or learned positions. As a tied head it is a linear without bias.

    `rows` says what its rows are ("vocab"; None: what every rank of a parallel run has whole).
    """

    weight: Tensor

    def __init__(self, count: int, width: int, rows: str | None = None) -> None:
        self.count = count
        self.width = width
        self.rows = rows
        self.method: LinearMethod | None = None
        self.bias: Tensor | None = None

    def params(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec((("", self.count),), (self.width,), rows=self.rows)}


class Biased(Holder):
    """A tied head with a bias: the rows of a table, and a number for each, stored as a row of their own. `never`: a row that is
    not to be chosen."""

    def __init__(self, table: Embedding, never: int | None = None) -> None:
        self.table = table
        self.never = never
        self.method: LinearMethod | None = None
        self.bias: Tensor = None

    @property
    def weight(self) -> Tensor:
        return self.table.weight

    def params(self) -> dict[str, ParamSpec]:
        return {"bias": ParamSpec((("", 1),), (self.table.count,))}

    def finish(self) -> None:
        self.bias = self.bias[0]
        if self.never is not None:
            self.bias[self.never] = -math.inf


class Sinusoids(Holder):
    """Positions that are computed, not learned: sines of all frequencies, then the cosines (Marian, fairseq)."""

    weight: Tensor
    interleaved = False  # as of a Rotary: all sines come before all cosines

    def __init__(self, count: int, width: int) -> None:
        self.count = count
        self.width = width

    @property
    def frequencies(self) -> np.ndarray:
        """[width / 2] float64, radians a position."""
        return 1 / 10000.0 ** (np.arange(0, self.width, 2) / self.width)

    def create(self, allocator: Allocator) -> None:
        self.weight = allocator.empty((self.count, self.width))
        self.weight[:] = allocator.constant(self.values)

    @property
    def values(self) -> np.ndarray:
        """[count, width] float32, as such models were trained with."""
        angles = np.arange(self.count)[:, None] / 10000.0 ** (np.arange(0, self.width, 2) / self.width)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class Relative(Holder):
    """`weight` [buckets, heads]: what attention adds by how far a key is (T5). Beyond `distance` all are alike; `both`: keys
    ahead have buckets of their own."""

    weight: Tensor

    def __init__(self, buckets: int, heads: int, distance: int, both: bool) -> None:
        self.buckets = buckets
        self.heads = heads
        self.distance = distance
        self.both = both

    def params(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec((("", self.buckets),), (self.heads,))}
