"""Linear: one or several projections of the same input, fused into one product when they are loaded."""

from collections.abc import Mapping
from typing import Any, Protocol

from headrace.models.layers.holder import Allocator, Holder, ParamSpec, Tensor


class LinearMethod(Protocol):
    """How weights are stored and multiplied where that is not densely: one object serves many layers; what a layer needs is put
    on the layer.

    The loader calls `create`, fills `layer.weight`, then calls `finish`; the op `linear` calls `apply` at every step.
    """

    def create(self, layer: Any, n_in: int, n_out: int, allocator: Allocator) -> None:
        """Allocate `layer.weight` [n_out, n_in], to be filled by the loader."""
        ...

    def finish(self, layer: Any) -> None:
        """Everything is filled: repack or quantise, and drop what is no longer needed."""
        ...

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, n_in] -> [n, n_out], in x's dtype."""
        ...


class Linear(Holder):
    """Weights [n_out, n_in] (and bias) whose rows are the parts one after the other.

    `parts` is the output width, or name -> width of each part ({"q": 576, "k": 192, "v": 192}); with `split` the op `linear`
    returns one value per part. `rows` says what its outputs are and `columns` what its inputs are ("heads", "ffn"; None: what
    every rank of a parallel run has whole).
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
