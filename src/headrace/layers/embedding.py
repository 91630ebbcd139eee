"""Embedding: a table of rows by id. Tied models use the same table as the head's linear."""

import torch

from headrace.layers.holder import Holder, ParamSpec
from headrace.layers.linear import DENSE, LinearMethod


class Embedding(Holder):
    """`weight` [rows, width]: token rows, or learned positions. As a tied head it is a linear without bias."""

    weight: torch.nn.Parameter

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.rows = rows
        self.width = width
        self.method: LinearMethod = DENSE
        self.bias: torch.nn.Parameter | None = None

    def params(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec((("", self.rows),), (self.width,))}
