"""Holder: the base of everything that owns weights. It is described first, allocated later, and computes nothing itself."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter before it exists: named parts stacked along the first axis, each filled from its own source tensor."""

    parts: tuple[tuple[str, int], ...]  # (name, rows); the name is "" where there is one part only
    tail: tuple[int, ...] = ()  # the other axes
    exact: bool = False  # kept in float32 or wider whatever the compute dtype
    rows: str | None = None  # what the rows of each part are, where ranks share them: heads | ffn | vocab; None: all have all
    columns: str | None = None  # the same of the other axis

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(rows for _, rows in self.parts), *self.tail)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Holder(torch.nn.Module):
    """`params` says what is needed, `create` allocates it, the loader fills it, `finish` ends loading."""

    def params(self) -> dict[str, ParamSpec]:
        """Field name (weight, bias) -> what it is made of."""
        return {}

    def create(self, dtype: torch.dtype) -> None:
        """Allocate every parameter on the current default device; values are whatever was in memory."""
        for name, spec in self.params().items():
            self.allocate(name, spec, dtype)

    def finish(self) -> None:
        """Called once, when every parameter is filled."""

    def allocate(self, name: str, spec: ParamSpec, dtype: torch.dtype) -> None:
        if spec.exact and dtype != torch.float64:
            dtype = torch.float32
        setattr(self, name, torch.nn.Parameter(torch.empty(spec.shape, dtype=dtype), requires_grad=False))
