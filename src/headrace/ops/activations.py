"""act and act_mul: the non-linear part of an MLP."""

from collections.abc import Callable

import torch
from torch.nn import functional

from headrace.ops.cases import activation_cases, gated_cases
from headrace.ops.registry import accumulator, op


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
}


@op(inputs=activation_cases)
def act(x: torch.Tensor, kind: str) -> torch.Tensor:
    """`kind` (silu | gelu | gelu_tanh | relu) of every value of x [n, width], computed in the accumulator type."""
    return FUNCTIONS[kind](x.to(accumulator(x.dtype))).to(x.dtype)


@op(inputs=gated_cases)
def act_mul(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """kind(gate) * up for gate_up [n, 2 * width] = gate beside up -> [n, width] (GLU variants, Shazeer 2020)."""
    gate, up = gate_up.to(accumulator(gate_up.dtype)).chunk(2, dim=-1)
    return (FUNCTIONS[kind](gate) * up).to(gate_up.dtype)
