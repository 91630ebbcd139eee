"""norm, residual, act, act_mul and tap: ops on single values or rows."""

from collections.abc import Callable

import torch
from torch.nn import functional

from headrace.ops import vocabulary
from headrace.ops.cases import activation_cases, gated_cases, norm_cases, residual_cases, tap_cases
from headrace.ops.context import Context
from headrace.ops.dtypes import TOLERANCE, accumulator
from headrace.ops.weights import NormWeights


def normalise(x: torch.Tensor, w: NormWeights) -> torch.Tensor:
    """The norm of the last axis of x (any shape), in the accumulator type."""
    x = x.to(accumulator(x.dtype))
    if w.kind == "layer":
        bias = None if w.bias is None else w.bias.to(x.dtype)
        return functional.layer_norm(x, x.shape[-1:], w.weight.to(x.dtype), bias, w.eps)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + w.eps) * w.weight.to(x.dtype)


@vocabulary.norm.body(norm_cases, TOLERANCE)
def norm(x: torch.Tensor, w: NormWeights) -> torch.Tensor:
    """RMSNorm or LayerNorm of x [n, width], by w.kind; rounded to x's dtype once, at the end.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    return normalise(x, w).to(x.dtype)


@vocabulary.residual.body(residual_cases, TOLERANCE)
def residual(x: torch.Tensor, y: torch.Tensor, post_norm: NormWeights | None = None) -> torch.Tensor:
    """x + y, or x + norm(y) if the architecture normalises a branch before it joins."""
    return x + (y if post_norm is None else normalise(y, post_norm).to(x.dtype))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu2": _relu2,
}


@vocabulary.act.body(activation_cases, TOLERANCE)
def act(x: torch.Tensor, kind: str) -> torch.Tensor:
    """`kind` (silu | gelu | gelu_tanh | relu | relu2) of every value of x [n, width], computed in the accumulator type."""
    return FUNCTIONS[kind](x.to(accumulator(x.dtype))).to(x.dtype)


@vocabulary.act_mul.body(gated_cases, TOLERANCE)
def act_mul(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """kind(gate) * up for gate_up [n, 2 * width], the gate's columns first -> [n, width].

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202.
    """
    gate, up = gate_up.to(accumulator(gate_up.dtype)).chunk(2, dim=-1)
    return (FUNCTIONS[kind](gate) * up).to(gate_up.dtype)


@vocabulary.tap.body(tap_cases, TOLERANCE)
def tap(x: torch.Tensor, name: str, ctx: Context) -> torch.Tensor:
    """Returns x unchanged; stores it in ctx.taps if the step asked for `name`."""
    if name in ctx.taps:
        ctx.taps[name] = x
    return x
