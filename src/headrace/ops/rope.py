"""Rotary positions (RoFormer, Su et al. 2021)."""

import torch

from headrace.ops.context import Context
from headrace.ops.registry import accumulator
from headrace.ops.weights import RopeWeights


def angles(ctx: Context, rope: RopeWeights, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [n, 1, dim / 2] of the step's rows; formed in float64, so that far positions keep their digits."""
    key = ("rope", id(rope), dtype)
    if key not in ctx.memo:
        phase = ctx.positions.to(torch.float64)[:, None, None] * rope.inv_freq
        ctx.memo[key] = phase.cos().to(dtype), phase.sin().to(dtype)
    made: tuple[torch.Tensor, torch.Tensor] = ctx.memo[key]
    return made


def rotate(x: torch.Tensor, rope: RopeWeights, ctx: Context) -> torch.Tensor:
    """x [n, heads, head_dim] with its first rope.dim values turned by the rows' positions, in the accumulator type."""
    x = x.to(accumulator(x.dtype))
    cos, sin = angles(ctx, rope, x.dtype)
    turned, rest = x[..., : rope.dim], x[..., rope.dim :]
    if rope.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((pairs, rest), dim=-1)
    a, b = turned.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
