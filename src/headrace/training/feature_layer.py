"""The feature layer as a function of its tensors over whole texts, for training; back ends run it by their own means."""

import torch
from torch.nn.functional import silu, softmax

from headrace.data.config import ModelConfig, RopeConfig
from headrace.models.layers.rotary import frequencies
from headrace.runner.heads import LAYER, Tensors, unit


class FeatureLayer:
    """The feature layer over texts [b, t], unrolled: pass 0 reads the target's rows, each later one the rows that the pass
    before it left, as in a chain."""

    def __init__(self, tensors: Tensors, config: ModelConfig, length: int) -> None:
        self.tensors = tensors
        self.config = config
        (self.layer,) = config.layers
        rope = self.layer.rope or RopeConfig()
        turns = torch.from_numpy(frequencies(rope, rope.dim or self.layer.head_dim))
        phase = torch.arange(length, dtype=torch.float64)[:, None] * turns
        self.cos, self.sin = phase.cos().float(), phase.sin().float()
        self.passes: list[tuple[torch.Tensor, torch.Tensor]] = []  # k, v [b, heads, t, head_dim] of each

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """One more pass over rows x [b, t, hidden] -> rows of the same shape."""
        w, eps = self.tensors, self.config.norm_eps
        normed = norm(x, w[LAYER + "input_layernorm.weight"], eps)
        q, k, v = (self._heads(normed @ w[f"{LAYER}self_attn.{name}_proj.weight"].t()) for name in "qkv")
        x = x + self._attend(self._turn(q), self._turn(k), v) @ w[LAYER + "self_attn.o_proj.weight"].t()
        normed = norm(x, w[LAYER + "post_attention_layernorm.weight"], eps)
        gate, up = (normed @ w[f"{LAYER}mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
        return x + (silu(gate) * up) @ w[LAYER + "mlp.down_proj.weight"].t()

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.layer.head_dim)).transpose(1, 2)

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions, in pairs (i, i + dim / 2)."""
        dim = 2 * self.cos.shape[-1]
        a, b = x[..., :dim].chunk(2, -1)
        turned = torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin, x[..., dim:]), -1)
        return turned.to(x.dtype)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Row p of pass d sees the rows of pass 0 up to p - d, and of each later pass the one row of its own chain."""
        groups = self.layer.heads // self.layer.kv_heads
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        self.passes.append((k, v))
        depth, length = len(self.passes) - 1, q.shape[2]
        scale = self.layer.head_dim**-0.5
        first = (q @ self.passes[0][0].transpose(2, 3)).float() * scale
        seen = torch.ones(length, length, dtype=torch.bool).tril(-depth)
        chain = [(_later(k, depth - d), _later(v, depth - d)) for d, (k, v) in enumerate(self.passes) if d > 0]
        scores = [first.masked_fill(~seen, -torch.inf), *((q * k).sum(-1, keepdim=True).float() * scale for k, _ in chain)]
        weights = softmax(torch.cat(scores, -1), -1).to(v.dtype)
        out = weights[..., :length] @ self.passes[0][1]
        for place, (_, value) in enumerate(chain):
            out = out + weights[..., length + place : length + place + 1] * value
        return out.transpose(1, 2).flatten(2)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of rows x [..., width], float32."""
    return unit(x, eps) * weight


def _later(x: torch.Tensor, by: int) -> torch.Tensor:
    """x [b, h, t, d] moved so that row t has what row t - `by` had; zeros come first."""
    return x if by == 0 else torch.cat((torch.zeros_like(x[:, :, :by]), x[:, :, :-by]), 2)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Rows x [b, t, width] one place later; zeros come first."""
    return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
