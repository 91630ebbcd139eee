"""Holder: the base of everything that owns weights. It is described first, allocated later, and computes nothing itself."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Tensor = Any  # of the back end that runs the model


class Allocator(Protocol):
    """Who makes a holder's tensors, in the dtype and on the device of the model."""

    def empty(self, shape: tuple[int, ...], exact: bool = False) -> Tensor:
        """A tensor to be filled; its values are whatever was in memory. `exact`: in float32 or wider whatever the dtype."""

    def constant(self, values: np.ndarray) -> Tensor:
        """A tensor of these values, in their own dtype."""


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


class Group:
    """Holders and groups of them, as attributes: themselves, or in a list."""

    def holders(self) -> "Iterator[tuple[str, Holder]]":
        """Every holder in it by path ("layers.3.qkv"), in the order they were made; what is shared (a tied head) comes once."""
        seen: set[int] = set()
        for path, group in self._groups(""):
            if isinstance(group, Holder) and id(group) not in seen:
                seen.add(id(group))
                yield path, group

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of what is filled, by path ("layers.3.qkv.weight")."""
        for path, holder in self.holders():
            for field in holder.params():
                yield ".".join(filter(None, (path, field))), getattr(holder, field)

    def parameters(self) -> Iterator[Tensor]:
        return (tensor for _, tensor in self.named_parameters())

    def _groups(self, prefix: str) -> "Iterator[tuple[str, Group]]":
        for name, value in vars(self).items():
            places = enumerate(value) if isinstance(value, list) else [(None, value)]
            for place, each in places:
                if isinstance(each, Group):
                    path = f"{prefix}{name}" if place is None else f"{prefix}{name}.{place}"
                    yield path, each
                    yield from each._groups(f"{path}.")


class Holder(Group):
    """`params` says what is needed, `create` allocates it, the loader fills it, `finish` ends loading."""

    def holders(self) -> "Iterator[tuple[str, Holder]]":
        yield "", self

    def params(self) -> dict[str, ParamSpec]:
        """Field name (weight, bias) -> what it is made of."""
        return {}

    def create(self, allocator: Allocator) -> None:
        """Allocate every parameter."""
        for name, spec in self.params().items():
            setattr(self, name, allocator.empty(spec.shape, spec.exact))

    def finish(self) -> None:
        """Called once, when every parameter is filled."""
