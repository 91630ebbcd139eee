"""Embedding: a table of rows by id. Tied models use the same table as the head's linear."""

from headrace.layers.holder import Holder, ParamSpec, Tensor
from headrace.layers.linear import LinearMethod


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
