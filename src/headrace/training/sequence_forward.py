"""Texts through a model file, fed whole, with gradients where its weights have them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import log_softmax

from headrace.backends.eager.play import play
from headrace.kv.pool import FreshPool
from headrace.models.base import Model
from headrace.ops.attention import rotate
from headrace.ops.context import Context, FeedRows, build
from headrace.ops.elementwise import normalise
from headrace.ops.registry import OPS
from headrace.runner.record import Recording

BLOCK = 16


@dataclass(slots=True)
class Passed:
    """What texts left: `rows` [tokens, hidden] after the last layer, `after` each of the layers that were asked for, and, of
    one text, logarithms of the attention `maps` [heads, rows, keys] of every layer, where a recording was given."""

    rows: torch.Tensor
    after: list[torch.Tensor]
    maps: list[torch.Tensor] = field(default_factory=list)


def fed(model: Model, tokens: Sequence[int], layers: Sequence[int] = (), recording: Recording | None = None) -> Passed:
    """Feed a text. Raises ValueError for attention maps of a model that changes its scores in ways not known here."""
    return fed_together(model, [tokens], layers, recording)


def fed_together(
    model: Model, texts: Sequence[Sequence[int]], layers: Sequence[int] = (), recording: Recording | None = None
) -> Passed:
    """The same of several texts, whose rows come one text after the other."""
    feeds: list[FeedRows] = []
    count = 0
    for tokens in texts:
        blocks = range(count, count + -(-len(tokens) // BLOCK))
        feeds.append(FeedRows(tokens, blocks))
        count = blocks.stop
    pool = FreshPool(model.config, count, BLOCK, next(model.parameters()).dtype)
    ctx = build(pool, feeds)
    ctx.taps.update({f"layer.{layer}": None for layer in layers})
    made = Passed(model.embed(ctx), [])
    for number in range(model.config.num_layers):
        if recording is None:
            made.rows = model.layer(number, made.rows, ctx)
        else:
            segment = recording.layers[number]
            made.rows = play(segment, [0] * len(segment.nodes), 0, made.rows, ctx, {"attention": _watched(made.maps)})
    made.after = [rows for layer in layers if (rows := ctx.taps[f"layer.{layer}"]) is not None]
    return made


def _watched(maps: list[torch.Tensor]) -> Any:
    """The op attention, which leaves its map."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: Context, layer: int, **more: Any) -> Any:
        maps.append(attention_map(q, k, ctx, **more))
        return OPS["attention"](q, k, v, ctx, layer, **more)

    return attention


def attention_map(
    q: torch.Tensor,
    k: torch.Tensor,
    ctx: Context,
    rope: Any = None,
    q_norm: Any = None,
    k_norm: Any = None,
    window: int | None = None,
    scale: float | None = None,
    **others: Any,
) -> torch.Tensor:
    """Logarithms of how much each row of one text looks at each token: [heads, rows, keys] of q [n, heads * dim] and k."""
    if changed := [name for name in ("softcap", "sinks", "bias") if others.get(name) is not None]:
        raise ValueError(f"attention maps of a model with {', '.join(changed)} are not taken; leave the loss attention out")
    dim = ctx.pool.data.shape[-1]

    def heads(x: torch.Tensor, norm: Any) -> torch.Tensor:
        x = x.view(len(x), -1, dim)
        x = x if norm is None else normalise(x, norm)
        return x if rope is None else rotate(x, rope, ctx)

    query, keys = heads(q, q_norm), heads(k, k_norm)
    keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * (dim**-0.5 if scale is None else scale)
    behind = ctx.positions[:, None] - ctx.positions[None, :]
    seen = (behind >= 0) & (behind < (window or len(q) + 1))
    return log_softmax(scores.masked_fill(~seen, -torch.inf), -1)
