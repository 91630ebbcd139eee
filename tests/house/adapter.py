"""linear for a step in which some rows have an update of low rank (LoRA, Hu et al. 2021) of their own."""

from typing import Any

import torch

from headrace.ops.context import Context
from headrace.ops.linears import product
from headrace.ops.weights import LinearWeights


def adapted(x: torch.Tensor, w: LinearWeights, ctx: Context) -> Any:
    """`ctx.memo["adapter"]`: the rows [r], and by layer the matrices down [rank, n_in] and up [n_out, rank]."""
    y = product(x, w)
    rows, updates = ctx.memo.get("adapter", (None, {}))
    if w in updates:
        down, up = updates[w]
        y[rows] += x[rows] @ down.t() @ up.t()
    return y.split(w.sizes, dim=-1) if w.split else y
