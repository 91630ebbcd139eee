"""tap: a named place in a model where hidden states can be taken out."""

import torch

from headrace.ops.cases import tap_cases
from headrace.ops.context import Context
from headrace.ops.registry import op


@op(inputs=tap_cases)
def tap(x: torch.Tensor, name: str, ctx: Context) -> torch.Tensor:
    """x unchanged; where the step asked for `name` (ctx.taps has the key) it is kept there."""
    if name in ctx.taps:
        ctx.taps[name] = x
    return x
