"""What ops expect of the weights they are given: the layers package makes them, a recorder treats them as handles."""

from typing import Any, Protocol

import torch


class Multiplies(Protocol):
    """The part of a LinearMethod (quant.method) that ops use."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [n, n_in] -> [n, n_out], in x's dtype."""
        ...


class LinearWeights(Protocol):
    method: Multiplies
    bias: torch.Tensor | None  # [n_out]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each part; their sum is n_out."""
        ...

    @property
    def split(self) -> bool:
        """Whether the parts come back as separate values."""
        ...


class HeadWeights(Protocol):
    method: Multiplies
    bias: torch.Tensor | None


class EmbeddingWeights(Protocol):
    weight: torch.Tensor  # [rows, hidden]


class NormWeights(Protocol):
    kind: str  # rms | layer
    eps: float
    weight: torch.Tensor  # [width], float32 or float64; what is multiplied (gemma's 1 + w, not w)
    bias: torch.Tensor | None


class RopeWeights(Protocol):
    dim: int  # rotated part of a head
    interleaved: bool
    inv_freq: torch.Tensor  # [dim / 2] float64, radians per position
