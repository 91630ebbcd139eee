"""LinearMethod: how a linear's weights are stored and multiplied."""

from typing import Any, Protocol

import torch


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
