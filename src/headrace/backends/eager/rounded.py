"""Rounding of activations to int8 and back in torch, as the native core rounds: its loss can be measured on any device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from headrace.models.base import Model
from headrace.models.layers import Allocator, Embedding, Linear

# Absolute value from which an input is an outlier (LLM.int8(), Dettmers et al. 2022, arXiv 2208.07339).
THRESHOLD = 6.0
# Most outliers of a row.
MOST = 64
GROUP = 32  # columns


def rounded(x: Tensor, activations: str, threshold: float = THRESHOLD, scale: float = 0.0) -> Tensor:
    """Rows x [n, k] rounded to int8 and converted back, in x's dtype.

    activations: what shares a scale (largest absolute value / 127).
    token: a row.
    group: 32 columns of a row.
    split: as group, but outliers (absolute value at least `threshold`, at most the 64 largest of a row) are not rounded and do
    not enlarge a scale.
    tensor: all rows share the static `scale`, and values beyond ±127 times it are clipped; scale 0: as token.
    """
    wide = x.float()
    if activations == "tensor" and scale:
        return ((wide / scale).clamp(-127, 127).round() * scale).to(x.dtype)
    if activations in ("token", "tensor"):
        return _int8(wide).to(x.dtype)
    if activations == "group":
        threshold = torch.inf
    sizes = torch.where(wide.isfinite(), wide.abs(), -1.0)
    order = sizes.argsort(dim=-1, descending=True, stable=True)[:, :MOST]
    kept = torch.zeros_like(sizes, dtype=torch.bool).scatter_(1, order, True) & (sizes >= threshold)
    rest = pad(torch.where(kept, 0.0, wide), (0, -x.shape[1] % GROUP)).unflatten(-1, (-1, GROUP))
    return torch.where(kept, wide, _int8(rest).flatten(-2)[:, : x.shape[1]]).to(x.dtype)


def _int8(x: Tensor) -> Tensor:
    """Round to int8 and convert back, with one scale (largest absolute value / 127) for the last axis."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round() * scale, x * 0)


class RoundedInputs:
    """LinearMethod over dense weights that rounds the inputs of integer parts; float parts read unrounded inputs."""

    def __init__(self, activations: str, parts: Sequence[tuple[int, bool]], scale: float = 0.0) -> None:
        """parts: of each its number of outputs, and whether its weights are stored as integers.

        scale: static scale of the inputs in the file; 0: none.
        """
        self.activations, self.parts, self.scale = activations, tuple(parts), scale

    def create(self, layer: Any, n_in: int, n_out: int, allocator: Allocator) -> None:
        raise AssertionError("inputs are rounded of a model that is there")

    def finish(self, layer: Any) -> None:
        raise AssertionError("inputs are rounded of a model that is there")

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        y = linear(rounded(x, self.activations, scale=self.scale), layer.weight, bias)
        if all(integers for _, integers in self.parts):
            return y
        sizes = [rows for rows, _ in self.parts]
        pairs = zip(y.split(sizes, -1), linear(x, layer.weight, bias).split(sizes, -1), self.parts, strict=True)
        return torch.cat([mine if integers else plain for mine, plain, (_, integers) in pairs], -1)


def round_inputs(model: Model, integers: dict[str, tuple[bool, ...]], activations: str, scales: dict[str, float]) -> None:
    """Make a model round the inputs of its integer weights.

    integers: by path of a holder, whether each of its parts is stored as integers. scales: static scale of a holder's inputs,
    by path, if the file has one.
    """
    for path, holder in model.holders():
        if isinstance(holder, Linear | Embedding) and any(flags := integers.get(path, ())):
            sizes = [rows for _, rows in holder.params()["weight"].parts]
            holder.method = RoundedInputs(activations, list(zip(sizes, flags, strict=True)), scales.get(path, 0.0))
