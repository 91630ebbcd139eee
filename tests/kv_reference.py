"""A forward pass of a Llama over a whole text with a choice of the layers whose K and V are read, written by hand: without the
project's operations, pools and tables."""

from collections.abc import Sequence
from typing import Any

import torch


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Heads [n, heads, dim] rotated by their positions, in halves."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x), dtype=x.dtype)[:, None, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x.split(half, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


@torch.no_grad()
def reference(model: Any, prompt: list[int], sources: Sequence[int | None]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of a whole prompt in a Llama with plain rotary settings, float64.

    sources: by layer, the one whose K and V it reads; None: its own.
    """
    c = model.config
    x, kept = model.tokens.weight[prompt], dict[int, tuple[torch.Tensor, torch.Tensor]]()
    back = torch.arange(len(prompt))[:, None] - torch.arange(len(prompt))
    for number, (layer, block, source) in enumerate(zip(c.layers, model.layers, sources, strict=True)):
        heads = (rms(x, block.attn_norm.weight, c.norm_eps) @ block.qkv.weight.T).view(len(prompt), -1, layer.head_dim)
        q, rest = turned(heads[:, : layer.heads], layer.rope.theta), heads[:, layer.heads :]
        if source is None:
            kept[number] = turned(rest[:, : layer.kv_heads], layer.rope.theta), rest[:, layer.kv_heads :]
        k, v = (each.repeat_interleave(layer.heads // layer.kv_heads, 1) for each in kept[number if source is None else source])
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.head_dim**-0.5
        seen = (back >= 0) & (back < (layer.window or len(prompt)))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ block.out.weight.T
        gate, up = (rms(x, block.mlp_norm.weight, c.norm_eps) @ block.gate_up.weight.T).split(layer.ffn, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ block.down.weight.T
    return rms(x, model.norm.weight, c.norm_eps) @ model.tokens.weight.T
