"""Forward pass of whole token sequences through a model, with gradients for weights that require them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import log_softmax

from headrace.backends.eager.program import play
from headrace.kv.pool import FreshPool
from headrace.models.base import Model
from headrace.ops.attention import rotate
from headrace.ops.context import Context, FeedRows, build
from headrace.ops.elementwise import normalise
from headrace.ops.registry import OPS
from headrace.runner.record import Recording

# Tokens of a K/V block.
BLOCK = 16


@dataclass(slots=True)
class SequenceOutput:
    """Output of a forward pass.

    rows: [tokens, hidden] after the last layer. after: the same after each of the chosen layers.
    maps: logarithms of the attention maps [heads, rows, keys] of each layer; empty without a recording.
    """

    rows: torch.Tensor
    after: list[torch.Tensor]
    maps: list[torch.Tensor] = field(default_factory=list)


def run_sequence(
    model: Model, tokens: Sequence[int], layers: Sequence[int] = (), recording: Recording | None = None
) -> SequenceOutput:
    """Run one sequence. layers: indices of the layers for `SequenceOutput.after`. recording: of the model, to take the maps.

    Raises ValueError if the maps of this model's attention are not supported.
    """
    return run_sequences(model, [tokens], layers, recording)


def run_sequences(
    model: Model, sequences: Sequence[Sequence[int]], layers: Sequence[int] = (), recording: Recording | None = None
) -> SequenceOutput:
    """Run several sequences in one pass; their rows follow each other. Otherwise as `run_sequence`."""
    feeds: list[FeedRows] = []
    count = 0
    for tokens in sequences:
        blocks = range(count, count + -(-len(tokens) // BLOCK))
        feeds.append(FeedRows(tokens, blocks))
        count = blocks.stop
    pool = FreshPool(model.config, count, BLOCK, next(model.parameters()).dtype)
    ctx = build(pool, feeds)
    ctx.taps.update({f"layer.{layer}": None for layer in layers})
    output = SequenceOutput(model.embed(ctx), [])
    for number in range(model.config.num_layers):
        if recording is None:
            output.rows = model.layer(number, output.rows, ctx)
        else:
            segment = recording.layers[number]
            ops = {"attention": _attention_with_map(output.maps)}
            output.rows = play(segment, [0] * len(segment.nodes), 0, output.rows, ctx, ops)
    output.after = [rows for layer in layers if (rows := ctx.taps[f"layer.{layer}"]) is not None]
    return output


def _attention_with_map(maps: list[torch.Tensor]) -> Any:
    """Return an attention op that also appends its map to `maps`."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: Context, layer: int, **options: Any) -> Any:
        maps.append(attention_map(q, k, ctx, layer, **options))
        return OPS["attention"](q, k, v, ctx, layer, **options)

    return attention


def attention_map(
    q: torch.Tensor,
    k: torch.Tensor,
    ctx: Context,
    layer: int,
    rope: Any = None,
    q_norm: Any = None,
    k_norm: Any = None,
    window: int | None = None,
    scale: float | None = None,
    **options: Any,
) -> torch.Tensor:
    """Logarithms of the causal attention weights of one sequence, [heads, rows, keys].

    q: [rows, heads * dim]. k: [rows, kv_heads * dim]. Raises ValueError for a softcap, sinks or a bias.
    """
    if unsupported := [name for name in ("softcap", "sinks", "bias") if options.get(name) is not None]:
        raise ValueError(f"attention maps of a model with {', '.join(unsupported)} are not taken; leave the loss attention out")
    dim = ctx.pool.kv(layer)[0].shape[-1]

    def heads(x: torch.Tensor, norm: Any) -> torch.Tensor:
        x = x.view(len(x), -1, dim)
        x = x if norm is None else normalise(x, norm)
        return x if rope is None else rotate(x, rope, ctx)

    query, keys = heads(q, q_norm), heads(k, k_norm)
    keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * (dim**-0.5 if scale is None else scale)
    distance = ctx.positions[:, None] - ctx.positions[None, :]
    visible = (distance >= 0) & (distance < (window or len(q) + 1))
    return log_softmax(scores.masked_fill(~visible, -torch.inf), -1)
