"""Llama and the families of its order of ops: pre-norm blocks of rotary grouped-query attention and a gated SiLU MLP."""

from collections.abc import Callable
from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.base import Model, Value
from headrace.models.layers import Biased, Embedding, Group, Linear, Norm, rotaries
from headrace.ops.vocabulary import act_mul, attention, embed, head, linear, norm, residual, tap


class LlamaLayer(Group):
    def __init__(self, c: ModelConfig, layer: LayerConfig) -> None:
        self.attn_norm = Norm(c.hidden_size, c.norm_eps)
        self.qkv = Linear(c.hidden_size, layer.qkv, bias=c.qkv_bias, split=True, rows="heads")
        self.q_norm = Norm(layer.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = Norm(layer.head_dim, c.norm_eps) if c.qk_norm and layer.kv_from is None else None
        self.out = Linear(layer.q_size, c.hidden_size, bias=c.out_bias, columns="heads")
        self.mlp_norm = Norm(c.hidden_size, c.norm_eps)
        self.gate_up = Linear(c.hidden_size, {"gate": layer.ffn, "up": layer.ffn}, bias=c.mlp_bias, rows="ffn")
        self.down = Linear(layer.ffn, c.hidden_size, bias=c.mlp_bias, columns="ffn")


class Llama(Model):
    layer_type: Callable[[ModelConfig, LayerConfig], Group] = LlamaLayer

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.tokens = Embedding(config.vocab_size, config.hidden_size, rows="vocab")
        self.ropes = rotaries(config)
        self.layers = [self.layer_type(config, layer) for layer in config.layers]
        self.norm = Norm(config.hidden_size, config.norm_eps)
        tied = Biased(self.tokens, config.never) if config.head_bias else self.tokens
        self.output = tied if config.tied_head else Linear(config.hidden_size, config.vocab_size, rows="vocab")

    def embed(self, ctx: Any) -> Value:
        return embed(ctx.ids, self.tokens, scale=self.config.embed_scale, exact=True)

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        c, block = self.config, self.layers[i]
        q, *own = linear(norm(x, block.attn_norm), block.qkv, ctx)
        k, v = own or (None, None)
        window, scale = c.layers[i].window, c.attn_scale
        attended = attention(
            q,
            k,
            v,
            ctx,
            i,
            rope=self.ropes[i],
            q_norm=block.q_norm,
            k_norm=block.k_norm,
            window=window,
            scale=scale,
        )
        x = residual(x, linear(attended, block.out, ctx))
        return tap(residual(x, self.mlp(block, norm(x, block.mlp_norm), ctx)), f"layer.{i}", ctx)

    def mlp(self, block: Any, x: Value, ctx: Any) -> Value:
        """The MLP of rows [n, hidden] that are already normed."""
        return linear(act_mul(linear(x, block.gate_up, ctx), "silu"), block.down, ctx)

    def head(self, x: Value) -> Value:
        return head(norm(x, self.norm), self.output, scale=self.config.head_scale)
