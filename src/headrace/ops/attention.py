"""attention: scaled dot-product attention over the paged pool, with the options of all architectures. store: writes K/V
alone."""

import math

import torch

from headrace.data.plan import TOKENS, WINDOWS
from headrace.ops import vocabulary
from headrace.ops.cases import attention_cases, store_cases
from headrace.ops.context import Context
from headrace.ops.dtypes import TOLERANCE, accumulator
from headrace.ops.elementwise import normalise
from headrace.ops.paging import Sight, TileGroup, groups
from headrace.ops.weights import EmbeddingWeights, NormWeights, RelativeWeights, RopeWeights


@vocabulary.attention.body(attention_cases, TOLERANCE)
def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    ctx: Context,
    layer: int,
    rope: RopeWeights | None = None,
    q_norm: NormWeights | None = None,
    k_norm: NormWeights | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: EmbeddingWeights | None = None,
    causal: bool = True,
    source: bool = False,
    bias: RelativeWeights | None = None,
) -> torch.Tensor:
    """softmax(q kᵀ · scale) v for q [n, heads * head_dim] and k, v [n, kv_heads * head_dim] -> [n, heads * head_dim].

    q and k are normalised per head (`q_norm`, `k_norm`) and rotated (`rope`). Then k and v are stored in the pool, and
    attention reads only the pool. Query head i uses KV head i * kv_heads // heads, so MHA, GQA and MQA are one path. Without k
    and v the layer reads the K/V that another layer stored.

    window: a row sees the last `window` positions, its own included. scale: default head_dim ** -0.5. softcap c: scores become
    c * tanh(score / c). sinks (weight [heads]): a logit per head in the softmax without a value. causal=False: every row of a
    feed sees the whole feed (encoders; feeds must be whole). source: every row sees its feed's whole source, whose K/V `store`
    wrote into table 1; k and v are None. bias: per head a number by the distance of key and row, added to the scaled scores
    (T5).

    Scores and sums are float32, or float64 for float64 inputs. A row that sees nothing gives 0.
    """
    dim = ctx.pool.kv(layer)[0].shape[-1]
    n, heads = q.shape[0], q.shape[1] // dim
    acc = accumulator(q.dtype)
    query = grown(_prepare(q.view(n, heads, dim), q_norm, rope, ctx), rope, ctx) * (dim**-0.5 if scale is None else scale)
    if k is not None and v is not None:
        _write(k, v, ctx, layer, rope, k_norm)
    elif k is not v:
        raise ValueError("attention: rows come with K and V or without both")
    key_pool, value_pool = ctx.pool.kv(layer)  # after the write: a pool that keeps gradients holds others then
    out = torch.empty(n, heads, dim, dtype=acc, device=q.device)
    sink = None if sinks is None else sinks.weight.to(acc)
    table = WINDOWS if ctx.pool.pool_of(layer) else TOKENS
    for group in groups(ctx, Sight(heads, window, causal, source, bias is not None, table)):
        keys = key_pool[group.blocks].flatten(1, 2).to(acc)
        values = value_pool[group.blocks].flatten(1, 2).to(acc)
        # 0 * NaN is NaN: another request's values must not leak in.
        values = values.masked_fill(~group.reached[:, :, None, None], 0.0)
        attended = attend(query[group.rows], keys, values, group.visible, softcap, sink, bias_of(ctx, group, bias, acc))
        out.index_copy_(0, group.target, attended.flatten(0, 1)[group.meant])
    return out.view(n, heads * dim).to(q.dtype)


@vocabulary.store.body(store_cases, TOLERANCE)
def store(
    k: torch.Tensor,
    v: torch.Tensor,
    ctx: Context,
    layer: int,
    rope: RopeWeights | None = None,
    k_norm: NormWeights | None = None,
) -> torch.Tensor:
    """Write k and v [n, kv_heads * head_dim] into the pool at the rows' places; nothing is read. k is normalised and rotated as
    in `attention`. For the K/V of an encoder's rows in a decoder layer, and for layers that only fill K/V. Returns k
    unchanged."""
    _write(k, v, ctx, layer, rope, k_norm)
    return k


def _write(
    k: torch.Tensor, v: torch.Tensor, ctx: Context, layer: int, rope: RopeWeights | None, k_norm: NormWeights | None
) -> None:
    heads, dim = ctx.pool.kv(layer)[0].shape[2:]
    slots = ctx.slots[ctx.pool.pool_of(layer)]
    ctx.pool.write(layer, slots, _prepare(k.view(-1, heads, dim), k_norm, rope, ctx), v.view(-1, heads, dim))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [b, c, heads, d] (scaled) over k, v [b, t, kv_heads, d] where visible [b, c, t] -> [b, c, heads, d]. bias [b, heads, c,
    t] is added to the scores."""
    b, c, heads, d = q.shape
    kv_heads = k.shape[2]
    share = heads // kv_heads  # query heads of one KV head; they are rows of one product, so K and V are not repeated
    rows = q.view(b, c, kv_heads, share, d).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, share * c, d)
    scores = (rows @ k.permute(0, 2, 3, 1)).view(b, kv_heads, share, c, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.view(b, kv_heads, share, c, -1)
    scores.masked_fill_(~visible[:, None, None], -torch.inf)  # in place from here: scores are the one big thing
    top = scores.detach().amax(-1, keepdim=True)  # what is subtracted changes no result: it needs no gradient
    sink = None if sinks is None else sinks.view(1, kv_heads, share, 1, 1)
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    top = top.clamp_min(torch.finfo(q.dtype).min)  # a row that sees nothing: exp(-inf), not exp(nan)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    out = (weights.view(b, kv_heads, share * c, -1) @ v.permute(0, 2, 1, 3)).view(b, kv_heads, share, c, d)
    out = out / total.clamp_min(torch.finfo(q.dtype).tiny)
    return out.permute(0, 3, 1, 2, 4).reshape(b, c, heads, d)


def _prepare(x: torch.Tensor, w: NormWeights | None, rope: RopeWeights | None, ctx: Context) -> torch.Tensor:
    x = x.to(accumulator(x.dtype)) if w is None else normalise(x, w)
    return x if rope is None else rotate(x, rope, ctx)


def grown(query: torch.Tensor, rope: RopeWeights | None, ctx: Context) -> torch.Tensor:
    """Queries [n, heads, head_dim] times 1 + growth * ln(1 + position // length), if the settings have a growth."""
    if rope is None or not rope.growth:
        return query
    return query * (1 + rope.growth * torch.log1p((ctx.positions // rope.length).to(query.dtype)))[:, None, None]


def angles(ctx: Context, rope: RopeWeights, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [n, 1, dim / 2] of the step's rows; formed in float64, so that far positions keep their digits."""
    key = ("rope", id(rope), dtype)
    if key not in ctx.memo:
        phase = ctx.positions.to(torch.float64)[:, None, None] * rope.inv_freq
        ctx.memo[key] = (rope.amplitude * phase.cos()).to(dtype), (rope.amplitude * phase.sin()).to(dtype)
    tables: tuple[torch.Tensor, torch.Tensor] = ctx.memo[key]
    return tables


def rotate(x: torch.Tensor, rope: RopeWeights, ctx: Context) -> torch.Tensor:
    """x [n, heads, head_dim] with its first rope.dim values rotated by the rows' positions, in the accumulator type."""
    x = x.to(accumulator(x.dtype))
    cos, sin = angles(ctx, rope, x.dtype)
    turned, rest = x[..., : rope.dim], x[..., rope.dim :]
    if rope.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((pairs, rest), dim=-1)
    a, b = turned.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def bias_of(ctx: Context, group: TileGroup, w: RelativeWeights | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The numbers [b, heads, c, t] that relative positions add to a group's scores, None if the model has none.

    A number per head is learned for buckets of distances. It is computed once per step, as layers share their table.
    Source: Raffel et al., "Exploring the Limits of Transfer Learning" (T5), arXiv 1910.10683.
    """
    if w is None:
        return None
    key = ("relative", id(w), id(group), dtype)
    if key not in ctx.memo:
        assert group.distance is not None
        at = buckets(group.distance, w.weight.shape[0], w.distance, w.both)
        ctx.memo[key] = w.weight.to(dtype)[at].permute(0, 3, 1, 2)
    bias: torch.Tensor = ctx.memo[key]
    return bias


def buckets(distance: torch.Tensor, count: int, most: int, both: bool) -> torch.Tensor:
    """The bucket, of `count`, of each distance (key - row), any shape.

    Half of the buckets are for single distances; the others grow with the logarithm up to `most`, and all farther distances
    have the last one. both: one half is for keys behind the row, the other for keys ahead; otherwise keys ahead count as
    distance 0. The logarithm is float32, as in training.
    """
    base = torch.zeros_like(distance)
    if both:
        count //= 2
        base = (distance > 0).long() * count
        far = distance.abs()
    else:
        far = (-distance).clamp_min(0)
    exact = count // 2
    grown = torch.log(far.float() / exact) / math.log(most / exact) * (count - exact)
    large = (exact + grown.clamp_min(0).long()).clamp_max(count - 1)
    return base + torch.where(far < exact, far, large)
