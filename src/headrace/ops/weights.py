"""The weights that ops read: `models.layers` creates them, a recorder treats them as handles."""

from typing import Any, Protocol

import torch


class Multiplies(Protocol):
    """The part of a LinearMethod (models.layers) that ops use."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [n, n_in] -> [n, n_out], in x's dtype."""
        ...


class HeadWeights(Protocol):
    @property
    def weight(self) -> torch.Tensor:
        """[n_out, n_in]"""
        ...

    @property
    def method(self) -> Multiplies | None:
        """How the weights are multiplied; None: dense."""
        ...

    @property
    def bias(self) -> torch.Tensor | None: ...


class LinearWeights(HeadWeights, Protocol):
    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each part; their sum is n_out."""
        ...

    @property
    def split(self) -> bool:
        """Whether the parts are separate values."""
        ...


class EmbeddingWeights(Protocol):
    @property
    def weight(self) -> torch.Tensor:
        """[rows, width]"""
        ...


class TokenTypeWeights(EmbeddingWeights, Protocol):
    @property
    def separator(self) -> int | None:
        """The token after which tokens have the second type."""
        ...


class NormWeights(Protocol):
    @property
    def kind(self) -> str:
        """rms | layer"""
        ...

    @property
    def eps(self) -> float: ...

    @property
    def weight(self) -> torch.Tensor:
        """[width], float32 or float64: what is multiplied (gemma's 1 + w, not w)"""
        ...

    @property
    def bias(self) -> torch.Tensor | None: ...


class RopeWeights(Protocol):
    @property
    def dim(self) -> int:
        """Values of a head that are rotated; the rest is not."""
        ...

    @property
    def interleaved(self) -> bool:
        """Pairs are (2i, 2i + 1) instead of (i, i + dim / 2)."""
        ...

    @property
    def inv_freq(self) -> torch.Tensor:
        """[dim / 2] float64, radians per position"""
        ...

    @property
    def amplitude(self) -> float:
        """Factor of cos and sin."""
        ...

    @property
    def growth(self) -> float:
        """Queries are multiplied by 1 + growth * ln(1 + position // length)."""
        ...

    @property
    def length(self) -> int: ...


class RelativeWeights(Protocol):
    @property
    def weight(self) -> torch.Tensor:
        """[buckets, heads], added to a head's scores"""
        ...

    @property
    def distance(self) -> int:
        """All distances from here on share a bucket."""
        ...

    @property
    def both(self) -> bool:
        """Whether keys ahead have their own buckets."""
        ...
