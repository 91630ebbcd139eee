"""Relative positions as T5 has them: a number per head, learned for buckets of distances (Raffel et al. 2020)."""

import math

import torch

from headrace.ops.context import Context
from headrace.ops.paging import Group
from headrace.ops.weights import RelativeWeights


def bias_of(ctx: Context, group: Group, w: RelativeWeights | None, dtype: torch.dtype) -> torch.Tensor | None:
    """What is added to a group's scores: [b, heads, c, t]; made once per step, as layers share their table."""
    if w is None:
        return None
    key = ("relative", id(w), id(group), dtype)
    if key not in ctx.memo:
        assert group.distance is not None
        at = buckets(group.distance, w.weight.shape[0], w.distance, w.both)
        ctx.memo[key] = w.weight.to(dtype)[at].permute(0, 3, 1, 2)
    made: torch.Tensor = ctx.memo[key]
    return made


def buckets(distance: torch.Tensor, count: int, most: int, both: bool) -> torch.Tensor:
    """The bucket, of `count`, of each distance (key - row), any shape.

    Half of them are for single distances, the others grow with the logarithm up to `most`; all that is farther has the last
    one. With `both` one half is for keys behind the row, the other for those ahead; else keys ahead count as the row's own.
    The logarithm is of float32, as models were trained with it.
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
