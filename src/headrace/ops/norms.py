"""norm and residual."""

import torch
from torch.nn import functional

from headrace.ops.cases import norm_cases, residual_cases
from headrace.ops.registry import accumulator, op
from headrace.ops.weights import NormWeights


def normalise(x: torch.Tensor, w: NormWeights) -> torch.Tensor:
    """The norm of the last axis of x (any shape), returned in the accumulator type."""
    x = x.to(accumulator(x.dtype))
    if w.kind == "layer":
        bias = None if w.bias is None else w.bias.to(x.dtype)
        return functional.layer_norm(x, x.shape[-1:], w.weight.to(x.dtype), bias, w.eps)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + w.eps) * w.weight.to(x.dtype)


@op(inputs=norm_cases)
def norm(x: torch.Tensor, w: NormWeights) -> torch.Tensor:
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm of x [n, width], by w.kind; rounded to x's dtype once, at the end."""
    return normalise(x, w).to(x.dtype)


@op(inputs=residual_cases)
def residual(x: torch.Tensor, y: torch.Tensor, post_norm: NormWeights | None = None) -> torch.Tensor:
    """x + y, or x + norm(y) where the architecture normalises a branch before it joins."""
    return x + (y if post_norm is None else normalise(y, post_norm).to(x.dtype))
