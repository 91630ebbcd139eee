"""T5's relative positions: a number per head, learned for buckets of distances.

Source: Raffel et al., "Exploring the Limits of Transfer Learning" (T5), arXiv 1910.10683.
"""

import math

import torch

from headrace.ops.context import Context
from headrace.ops.paging import Group
from headrace.ops.weights import RelativeWeights


def bias_of(ctx: Context, group: Group, w: RelativeWeights | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The numbers [b, heads, c, t] added to a group's scores; computed once per step, as layers share their table."""
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
