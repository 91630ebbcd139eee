"""embed, linear and head: the ops with large weights."""

from typing import Any

import torch
from torch.nn import functional

from headrace.ops import vocabulary
from headrace.ops.cases import embed_cases, head_cases, linear_cases
from headrace.ops.dtypes import TOLERANCE, accumulator
from headrace.ops.weights import EmbeddingWeights, HeadWeights, LinearWeights, TokenTypeWeights


@vocabulary.embed.body(embed_cases, TOLERANCE)
def embed(
    ids: torch.Tensor,
    w: EmbeddingWeights,
    scale: float = 1.0,
    types: TokenTypeWeights | None = None,
    pos: EmbeddingWeights | None = None,
    positions: torch.Tensor | None = None,
    exact: bool = False,
) -> torch.Tensor:
    """Rows of w for ids [n] -> [n, hidden], times `scale`, plus a row of `types`, plus rows of `pos` at `positions` [n].

    scale: rounded to the weights' dtype, as in Gemma, unless `exact`. types: its first row, or its second one for the tokens
    after a text's first `types.separator`; texts begin at position 0.
    """
    x = w.weight[ids]
    if scale != 1.0:
        x = x * (scale if exact else torch.tensor(scale, dtype=x.dtype))
    if types is not None:
        x = x + (types.weight[0] if types.separator is None else types.weight[second_type(ids, positions, types.separator)])
    if pos is not None:
        x = x + pos.weight[positions]
    return x


def second_type(ids: torch.Tensor, positions: torch.Tensor | None, separator: int) -> torch.Tensor:
    """Token type of each token, [n]: 1 after the first `separator` of its text, which begins at position 0."""
    assert positions is not None
    separators = (ids == separator).long()
    before = separators.cumsum(0) - separators
    of_earlier_texts = torch.where(positions == 0, before, 0).cummax(0).values
    return (before > of_earlier_texts).long()


@vocabulary.linear.body(linear_cases, TOLERANCE)
def linear(x: torch.Tensor, w: LinearWeights, ctx: Any) -> Any:
    """x [n, n_in] times all parts of w at once, plus bias: [n, n_out], or one value per part where w.split. `ctx` is the step
    whose rows they are: an implementation may do more for some of them."""
    y = product(x, w)
    if getattr(ctx, "adapters", None) is not None and getattr(w, "adapters", None):
        add_adapters(y, x, w, ctx)
    return y.split(w.sizes, dim=-1) if w.split else y


@vocabulary.head.body(head_cases, TOLERANCE)
def head(x: torch.Tensor, w: HeadWeights, scale: float = 1.0, softcap: float | None = None) -> torch.Tensor:
    """Logits of rows x [r, hidden] -> [r, vocabulary] in the accumulator type (float32, or float64 of float64 models).

    `softcap` c bends them to c * tanh(logits / c) (Gemma 2).
    """
    logits = product(x, w).to(accumulator(x.dtype))
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def add_adapters(y: torch.Tensor, x: torch.Tensor, w: Any, ctx: Any) -> None:
    """Add to the rows of y that have an adapter the product of their rows of x with its matrices, in place."""
    for number, parts in w.adapters.items():
        rows = (ctx.adapters == number).nonzero()[:, 0]
        if not len(rows):
            continue
        for first, down, up in parts:
            y[rows, first : first + up.shape[1]] += x[rows] @ down.t() @ up


def product(x: torch.Tensor, w: HeadWeights) -> torch.Tensor:
    """x times the rows of w, plus bias: densely, or as w's own method has it."""
    return functional.linear(x, w.weight, w.bias) if w.method is None else w.method.apply(w, x, w.bias)
