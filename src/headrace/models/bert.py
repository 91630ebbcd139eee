"""BERT, XLM-R, MPNet and models of the same shape: encoders with norms after each branch and learned positions."""

from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.base import Model, Value
from headrace.models.layers import Embedding, Group, Linear, Norm, Relative, TokenTypes
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
    """Prompts are fed whole: their K and V are in the pool for one step. MPNet has no token types, and a bias by distance."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        width, types = config.hidden_size, config.token_types
        self.tokens = Embedding(config.vocab_size, width, rows="vocab")
        self.positions = Embedding(config.max_position, width)
        self.types = TokenTypes(types, width, config.separator) if types else None
        self.embed_norm = Norm(width, config.norm_eps, "layer", bias=True)
        heads, distance = config.layers[0].heads, config.bucket_distance
        self.relative = Relative(config.buckets, heads, distance, both=True) if config.buckets else None
        self.layers = [BertLayer(config, layer) for layer in config.layers]

    def embed(self, ctx: Any) -> Value:
        x = embed(ctx.ids, self.tokens, types=self.types, pos=self.positions, positions=ctx.positions)
        return norm(x, self.embed_norm)

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        block = self.layers[i]
        q, k, v = linear(x, block.qkv, ctx)
        attended = attention(q, k, v, ctx, i, causal=False, bias=self.relative)
        x = norm(residual(x, linear(attended, block.out, ctx)), block.attn_norm)
        x = norm(residual(x, linear(act(linear(x, block.up, ctx), "gelu"), block.down, ctx)), block.mlp_norm)
        return tap(x, f"layer.{i}", ctx)

    def final(self, x: Value) -> Value:
        return x  # the last layer's norm was the last
