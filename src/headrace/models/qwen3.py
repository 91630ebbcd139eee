"""Qwen3 (dense): Llama's block with an RMSNorm on every query and key head, and heads wider than hidden / heads."""

from typing import Any

from torch.nn import Module, ModuleList

from headrace.data.config import ModelConfig, RopeConfig
from headrace.layers.embedding import Embedding
from headrace.layers.linear import Linear
from headrace.layers.norm import Norm
from headrace.layers.rotary import Rotary
from headrace.models.base import Model, Value
from headrace.ops.vocabulary import act_mul, attention, embed, head, linear, norm, residual, tap


class Block(Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = Norm(c.hidden_size, c.norm_eps)
        self.qkv = Linear(
            c.hidden_size, {"q": c.q_size, "k": c.kv_size, "v": c.kv_size}, bias=c.qkv_bias, split=True, shard="out"
        )
        self.q_norm = Norm(c.head_dim, c.norm_eps)
        self.k_norm = Norm(c.head_dim, c.norm_eps)
        self.out = Linear(c.q_size, c.hidden_size, bias=c.out_bias, shard="in")
        self.mlp_norm = Norm(c.hidden_size, c.norm_eps)
        self.gate_up = Linear(c.hidden_size, {"gate": c.ffn_size, "up": c.ffn_size}, shard="out")
        self.down = Linear(c.ffn_size, c.hidden_size, shard="in")


class Qwen3(Model):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rope = Rotary(config.rope or RopeConfig(), config.head_dim)
        self.layers = ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.output = self.tokens if config.tied_head else Linear(config.hidden_size, config.vocab_size)

    def embed(self, ctx: Any) -> Value:
        return embed(ctx.ids, self.tokens)

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        block = self.layers[i]
        q, k, v = linear(norm(x, block.attn_norm), block.qkv)
        attended = attention(
            q, k, v, ctx, i, rope=self.rope, q_norm=block.q_norm, k_norm=block.k_norm, window=self.config.window(i)
        )
        x = residual(x, linear(attended, block.out))
        x = residual(x, linear(act_mul(linear(norm(x, block.mlp_norm), block.gate_up), "silu"), block.down))
        return tap(x, f"layer.{i}", ctx)

    def head(self, x: Value) -> Value:
        return head(norm(x, self.norm), self.output)
