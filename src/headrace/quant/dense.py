"""The plain linear: weights in the compute dtype, multiplied by torch."""

from typing import Any

import torch
from torch.nn import functional


class Dense:
    """LinearMethod of unquantised weights."""

    def create(self, layer: Any, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        layer.weight = torch.nn.Parameter(torch.empty(n_out, n_in, dtype=dtype), requires_grad=False)

    def finish(self, layer: Any) -> None:
        pass

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, layer.weight, bias)
