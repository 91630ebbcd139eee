"""Embedding: a table of rows by id. Tied models use the same table as the head's linear."""

import math

import numpy as np

from headrace.models.layers.holder import Allocator, Holder, ParamSpec, Tensor
from headrace.models.layers.linear import LinearMethod


class Embedding(Holder):
    """`weight` [count, width]: token embeddings or learned positions. A tied head uses it as a linear without bias.

    rows: axis that ranks of a parallel run split ("vocab"); None: every rank has all rows.
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
    """A tied head with a bias, which is stored as one row. never: token id that is never chosen."""

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
    """Sinusoidal positions: sines of all frequencies, then cosines (Marian, fairseq)."""

    weight: Tensor
    # As in Rotary: all sines before all cosines.
    interleaved = False

    def __init__(self, count: int, width: int) -> None:
        self.count = count
        self.width = width

    @property
    def frequencies(self) -> np.ndarray:
        """[width / 2] float64, radians per position."""
        return 1 / 10000.0 ** (np.arange(0, self.width, 2) / self.width)

    def create(self, allocator: Allocator) -> None:
        self.weight = allocator.empty((self.count, self.width))
        self.weight[:] = allocator.constant(self.values)

    @property
    def values(self) -> np.ndarray:
        """The table, [count, width] float32, as in training."""
        angles = np.arange(self.count)[:, None] / 10000.0 ** (np.arange(0, self.width, 2) / self.width)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class Relative(Holder):
    """`weight` [buckets, heads]: attention bias by distance of the key (T5).

    distance: farther keys share the last bucket. both: keys ahead have buckets of their own.
    """

    weight: Tensor

    def __init__(self, buckets: int, heads: int, distance: int, both: bool) -> None:
        self.buckets = buckets
        self.heads = heads
        self.distance = distance
        self.both = both

    def params(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec((("", self.buckets),), (self.heads,))}
