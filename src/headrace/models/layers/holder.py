"""`Holder`: base of objects that own weights. It is described first and allocated later, and computes nothing."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

# A tensor of the back end that runs the model.
Tensor = Any


class Allocator(Protocol):
    """Creates the tensors of holders in the dtype and on the device of the model."""

    def empty(self, shape: tuple[int, ...], exact: bool = False) -> Tensor:
        """An uninitialised tensor. exact: float32 or wider, whatever the dtype of the model."""

    def constant(self, values: np.ndarray) -> Tensor:
        """A tensor with these values, in their own dtype."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Description of a parameter: named parts stacked along the first axis, each filled from its own source tensor.

    parts: (name, rows); the name of a single part is "". tail: sizes of the other axes. exact: float32 or wider, whatever the
    compute dtype. rows: what the first axis counts (heads, ffn or vocab) if the ranks of a parallel run split it; None: every
    rank has all rows. columns: the same for the second axis.
    """

    parts: tuple[tuple[str, int], ...]
    tail: tuple[int, ...] = ()
    exact: bool = False
    rows: str | None = None
    columns: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(rows for _, rows in self.parts), *self.tail)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Group:
    """An object whose attributes are holders, groups, or lists of them."""

    def holders(self) -> "Iterator[tuple[str, Holder]]":
        """All holders by path ("layers.3.qkv"), in order of creation. A shared one (a tied head) comes once."""
        seen: set[int] = set()
        for path, group in self._groups(""):
            if isinstance(group, Holder) and id(group) not in seen:
                seen.add(id(group))
                yield path, group

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of filled holders, by path ("layers.3.qkv.weight")."""
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
    """Owner of parameters. `params` describes them, `create` allocates, the loader fills, `finish` ends loading."""

    def holders(self) -> "Iterator[tuple[str, Holder]]":
        yield "", self

    def params(self) -> dict[str, ParamSpec]:
        """Description of each parameter by field name (weight, bias)."""
        return {}

    def create(self, allocator: Allocator) -> None:
        """Allocate every parameter."""
        for name, spec in self.params().items():
            setattr(self, name, allocator.empty(spec.shape, spec.exact))

    def finish(self) -> None:
        """End loading: called once, after every parameter is filled."""
