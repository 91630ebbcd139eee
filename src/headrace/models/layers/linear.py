"""`Linear`: one or several projections of the same input, fused into one matrix when they are loaded."""

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.models.layers.holder import Allocator, Holder, ParamSpec, Tensor


class LinearMethod(Protocol):
    """Storage and multiplication of weights that are not dense. One object serves many layers and keeps their state on them.

    The loader calls `create`, fills `layer.weight`, then calls `finish`; the op `linear` calls `apply` at every step.
    """

    def create(self, layer: Any, n_in: int, n_out: int, allocator: Allocator) -> None:
        """Allocate `layer.weight` [n_out, n_in] for the loader."""
        ...

    def finish(self, layer: Any) -> None:
        """Called after the layer is filled: repack or quantise it, and free the rest."""
        ...

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, n_in] -> [n, n_out], in x's dtype."""
        ...


class Linear(Holder):
    """`weight` [n_out, n_in] and `bias`, with the rows of all parts stacked.

    parts: output width, or width by part ({"q": 576, "k": 192, "v": 192}). split: the op `linear` returns one value per part.
    rows, columns: how ranks of a parallel run split outputs and inputs ("heads", "ffn"); None: every rank has all.
    """

    weight: Tensor

    def __init__(
        self,
        n_in: int,
        parts: int | Mapping[str, int],
        bias: bool = False,
        split: bool = False,
        rows: str | None = None,
        columns: str | None = None,
    ) -> None:
        self.n_in = n_in
        self.parts = tuple({"": parts}.items() if isinstance(parts, int) else parts.items())
        self.sizes = tuple(rows for _, rows in self.parts)
        self.n_out = sum(self.sizes)
        self.split = split
        self.rows = rows
        self.columns = columns
        self.has_bias = bias
        self.method: LinearMethod | None = None
        self.bias: Tensor | None = None

    def params(self) -> dict[str, ParamSpec]:
        specs = {"weight": ParamSpec(self.parts, (self.n_in,), rows=self.rows, columns=self.columns)}
        if self.has_bias:
            specs["bias"] = ParamSpec(self.parts, rows=self.rows)
        return specs

    def create(self, allocator: Allocator) -> None:
        if self.method is None:
            super().create(allocator)
        else:
            self.method.create(self, self.n_in, self.n_out, allocator)
            self.bias = allocator.empty((self.n_out,)) if self.has_bias else None

    def finish(self) -> None:
        if self.method is not None:
            self.method.finish(self)
