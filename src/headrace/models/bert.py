"""BERT, MiniLM and their like: an encoder. Every token sees every other, norms come after each branch, nothing is generated."""

from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.base import Model, Value
from headrace.models.layers import Embedding, Group, Linear, Norm
from headrace.ops.vocabulary import act, attention, embed, linear, norm, residual, tap


class BertLayer(Group):
    def __init__(self, c: ModelConfig, layer: LayerConfig) -> None:
        self.qkv = Linear(c.hidden_size, layer.qkv, bias=True, split=True, rows="heads")
        self.out = Linear(layer.q_size, c.hidden_size, bias=True, columns="heads")
        self.attn_norm = Norm(c.hidden_size, c.norm_eps, "layer", bias=True)
        self.up = Linear(c.hidden_size, layer.ffn, bias=True, rows="ffn")
        self.down = Linear(layer.ffn, c.hidden_size, bias=True, columns="ffn")
        self.mlp_norm = Norm(c.hidden_size, c.norm_eps, "layer", bias=True)


class Bert(Model):
    """Feeds are whole: K and V live in the pool for the one step that computes them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.tokens = Embedding(config.vocab_size, config.hidden_size, rows="vocab")
        self.positions = Embedding(config.max_position, config.hidden_size)
        self.types = Embedding(config.token_types, config.hidden_size)
        self.embed_norm = Norm(config.hidden_size, config.norm_eps, "layer", bias=True)
        self.layers = [BertLayer(config, layer) for layer in config.layers]

    def embed(self, ctx: Any) -> Value:
        x = embed(ctx.ids, self.tokens, types=self.types, pos=self.positions, positions=ctx.positions)
        return norm(x, self.embed_norm)

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        block = self.layers[i]
        q, k, v = linear(x, block.qkv, ctx)
        x = norm(residual(x, linear(attention(q, k, v, ctx, i, causal=False), block.out, ctx)), block.attn_norm)
        x = norm(residual(x, linear(act(linear(x, block.up, ctx), "gelu"), block.down, ctx)), block.mlp_norm)
        return tap(x, f"layer.{i}", ctx)

    def final(self, x: Value) -> Value:
        return x  # the last layer's norm was the last
