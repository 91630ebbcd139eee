"""embed, linear and head: the ops with big weights."""

from typing import Any

import torch

from headrace.ops.cases import embed_cases, head_cases, linear_cases
from headrace.ops.registry import accumulator, op
from headrace.ops.weights import EmbeddingWeights, HeadWeights, LinearWeights


@op(inputs=embed_cases)
def embed(
    ids: torch.Tensor,
    w: EmbeddingWeights,
    scale: float = 1.0,
    pos: EmbeddingWeights | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows of w for ids [n] -> [n, hidden], times `scale` rounded to the weights' dtype (as gemma does it), plus the learned
    position rows of `pos` at `positions` [n] where the architecture has them."""
    x = w.weight[ids]
    if scale != 1.0:
        x = x * torch.tensor(scale, dtype=x.dtype)
    if pos is not None:
        x = x + pos.weight[positions]
    return x


@op(inputs=linear_cases)
def linear(x: torch.Tensor, w: LinearWeights, ctx: Any) -> Any:
    """x [n, n_in] times all parts of w at once, plus bias: [n, n_out], or one value per part where w.split. `ctx` is the step
    whose rows they are: an implementation may do more for some of them."""
    y = w.method.apply(w, x, w.bias)
    return y.split(w.sizes, dim=-1) if w.split else y


@op(inputs=head_cases)
def head(x: torch.Tensor, w: HeadWeights, scale: float = 1.0, softcap: float | None = None) -> torch.Tensor:
    """Logits of rows x [r, hidden] -> [r, vocabulary] in the accumulator type (float32, or float64 of float64 models).

    `softcap` c bends them to c * tanh(logits / c) (Gemma 2).
    """
    logits = w.method.apply(w, x, w.bias).to(accumulator(x.dtype))
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
