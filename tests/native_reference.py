"""The native core's arithmetic, said simply in torch: int8 or bfloat16 activations, K, V, queries and weights of attention in
bfloat16, everything else in float64."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headrace.backends.native.weights import PackedWeights
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.models.layers import Biased, Embedding, Holder, Linear
from headrace.models.registry import describe
from headrace.ops.attention import grown, rotate
from headrace.ops.context import Context
from headrace.ops.elementwise import normalise
from headrace.ops.paging import Sight, groups
from headrace.ops.registry import OPS
from headrace.weights.loader import Allocator


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To bfloat16 and back, by way of float32 as the core does it."""
    return x.float().bfloat16().to(x.dtype)


def int8_groups(x: torch.Tensor) -> torch.Tensor:
    """Each 32 columns as int8 with the scale largest / 127, and back."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    scale = padded.abs().amax(-1, keepdim=True) / 127
    values = torch.where(scale > 0, (padded / scale).round() * scale, 0.0)
    return values.flatten(-2)[..., : x.shape[-1]]


class Faked:
    """LinearMethod: exact products of what the core multiplies."""

    def __init__(self, form: str) -> None:
        self.form = form

    def create(self, layer: Any, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        raise AssertionError("made by reference_of only")

    def finish(self, layer: Any) -> None:
        raise AssertionError("made by reference_of only")

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        narrowed = rounded(x) if self.form == "bf16" else int8_groups(x)
        return torch.nn.functional.linear(narrowed, layer.weight, bias)


def reference_of(model: Model, weights: PackedWeights, dtype: torch.dtype = torch.float64) -> Model:
    """The same model in `dtype` with the packed weights as they are multiplied."""
    made = describe(model.config)
    holders = dict(model.holders())
    for path, holder in made.holders():
        for name in holder.params():
            setattr(holder, name, getattr(holders[path], name))
        narrow(holder, holders[path], weights, dtype)
        if not holder.params():
            holder.create(Allocator(dtype))
    for number in range(made.config.num_layers):
        centre(made, number)
    return made


def centre(model: Model, number: int) -> None:
    """Note what attention takes off every K of a layer: its bias in pairs that turn by a sixth at most over all positions."""
    ropes, qkv = getattr(model, "ropes", None), getattr(model.layers[number], "qkv", None)
    if ropes is None or qkv is None or qkv.bias is None:
        return
    rope = ropes[number]
    bias = dict(zip(dict(qkv.parts), qkv.bias.split(qkv.sizes), strict=True))["k"].view(
        -1, model.config.layers[number].head_dim
    )
    turns = (rope.inv_freq * model.config.max_position * 6 <= 2 * math.pi).repeat(2)
    still = torch.cat([turns, torch.zeros(bias.shape[1] - len(turns), dtype=torch.bool)])
    rope.shifts = {**getattr(rope, "shifts", {}), number: torch.where(still, bias, 0.0)}


def narrow(holder: Holder, packed: Holder, weights: PackedWeights, dtype: torch.dtype) -> None:
    """Give a linear layer, or a table, what the core multiplies in place of it: the weights packed for `packed`."""
    if isinstance(holder, Biased):
        holder.method = Faked(next(iter(weights.form(packed.table))))  # type: ignore[attr-defined]
    if isinstance(holder, Linear | Embedding):
        rows = torch.cat([torch.from_numpy(tensor.unpack()) for tensor in _tensors(weights, packed)])
        holder.weight = rows.to(dtype)
        (form,) = weights.form(packed)
        holder.method = Faked(form)


def _tensors(weights: PackedWeights, holder: Any) -> list[Any]:
    if isinstance(holder, Embedding):
        return [weights.table(holder)]
    if "gate" in dict(holder.parts) and weights.gated(holder) is not None:
        return list(weights.gated(holder).tensors)
    return [tensor for part in weights.linear(holder) for tensor in part.linear.tensors]


def attention(q: Any, k: Any, v: Any, ctx: Context, layer: int, **settings: Any) -> torch.Tensor:
    """Like the op, with queries, K, V and weights rounded to bfloat16."""
    key_pool, value_pool = ctx.pool.kv(layer)
    kv_heads, dim = key_pool.shape[2:]
    n, heads = q.shape[0], q.shape[1] // dim
    share = heads // kv_heads

    def prepared(x: torch.Tensor, count: int, norm: Any) -> torch.Tensor:
        x = x.view(n, count, dim)
        x = x if norm is None else normalise(x, norm)
        return x if settings["rope"] is None else rotate(x, settings["rope"], ctx)

    query = rounded(grown(prepared(q, heads, settings["q_norm"]), settings["rope"], ctx))
    keys = prepared(k, kv_heads, settings["k_norm"])
    if settings["k_norm"] is None:
        keys = keys - getattr(settings["rope"], "shifts", {}).get(layer, 0.0)
    ctx.pool.write(layer, ctx.slots[0], rounded(keys), rounded(v.view(n, kv_heads, dim)))
    scale = dim**-0.5 if settings["scale"] is None else settings["scale"]
    out = torch.zeros(n, heads, dim, dtype=q.dtype)
    for group in groups(ctx, Sight(heads, settings["window"])):
        keys = key_pool[group.blocks].flatten(1, 2).to(q.dtype).repeat_interleave(share, 2)
        values = value_pool[group.blocks].flatten(1, 2).to(q.dtype).repeat_interleave(share, 2)
        values = values.masked_fill(~group.reached[:, :, None, None], 0.0)  # what was never written
        scores = torch.einsum("bchd,bthd->bhct", query[group.rows], keys) * scale
        if settings["softcap"] is not None:
            scores = torch.tanh(scores / settings["softcap"]) * settings["softcap"]
        scores = scores.masked_fill(~group.visible[:, None], -torch.inf)
        weight = rounded(torch.exp(scores - scores.amax(-1, keepdim=True)).nan_to_num(0.0))
        attended = torch.einsum("bhct,bthd->bchd", weight, values) / weight.sum(-1).transpose(1, 2)[..., None]
        out.index_copy_(0, group.target, attended.flatten(0, 1)[group.meant])
    return out.flatten(1)


@contextmanager
def bfloat16_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While open, the op `attention` is the one above."""
    with monkeypatch.context() as patch:
        patch.setitem(OPS["attention"].implementations, "cpu", lambda *args, **more: attention(*args, **{**DEFAULTS, **more}))
        yield


DEFAULTS = dict.fromkeys(("rope", "q_norm", "k_norm", "window", "scale", "softcap", "sinks", "source"))


def pool_of(model: Model, blocks: int, block_size: int) -> KVPool:
    """A pool that keeps what bfloat16 keeps, read as float64."""
    return KVPool(model.config, blocks, block_size, torch.float64)
