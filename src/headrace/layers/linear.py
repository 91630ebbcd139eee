"""Linear: one or several projections of the same input, fused into one product when they are loaded."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.nn import functional

from headrace.layers.holder import Holder, ParamSpec


class LinearMethod(Protocol):
    """One object serves many layers; what a layer needs is put on the layer.

    The loader calls `create`, fills `layer.weight`, then calls `finish`; the op `linear` calls `apply` at every step.
    """

    def create(self, layer: Any, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        """Allocate `layer.weight` [n_out, n_in] on the current default device, to be filled by the loader."""
        ...

    def finish(self, layer: Any) -> None:
        """Everything is filled: repack or quantise, and drop what is no longer needed."""
        ...

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [n, n_in] -> [n, n_out], in x's dtype."""
        ...


class Dense:
    """LinearMethod of unquantised weights."""

    def create(self, layer: Any, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        layer.weight = torch.nn.Parameter(torch.empty(n_out, n_in, dtype=dtype), requires_grad=False)

    def finish(self, layer: Any) -> None:
        pass

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, layer.weight, bias)


DENSE = Dense()


class Linear(Holder):
    """Weights [n_out, n_in] (and bias) whose rows are the parts one after the other.

    `parts` is the output width, or name -> width of each part ({"q": 576, "k": 192, "v": 192}); with `split` the op `linear`
    returns one value per part. `rows` says what its outputs are and `columns` what its inputs are ("heads", "ffn"; None: what
    every rank of a parallel run has whole).
    """

    def __init__(
        self,
        n_in: int,
        parts: int | Mapping[str, int],
        bias: bool = False,
        split: bool = False,
        rows: str | None = None,
        columns: str | None = None,
    ) -> None:
        super().__init__()
        self.n_in = n_in
        self.parts = tuple({"": parts}.items() if isinstance(parts, int) else parts.items())
        self.sizes = tuple(rows for _, rows in self.parts)
        self.n_out = sum(self.sizes)
        self.split = split
        self.rows = rows
        self.columns = columns
        self.has_bias = bias
        self.method: LinearMethod = DENSE
        self.bias: torch.nn.Parameter | None = None

    def params(self) -> dict[str, ParamSpec]:
        specs = {"weight": ParamSpec(self.parts, (self.n_in,), rows=self.rows, columns=self.columns)}
        if self.has_bias:
            specs["bias"] = ParamSpec(self.parts, rows=self.rows)
        return specs

    def create(self, dtype: torch.dtype) -> None:
        self.method.create(self, self.n_in, self.n_out, dtype)
        if self.has_bias:
            self.allocate("bias", self.params()["bias"], dtype)

    def finish(self) -> None:
        self.method.finish(self)
