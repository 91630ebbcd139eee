"""Marian (opus-mt): an encoder-decoder. Norms come after each branch, positions are sines and cosines, the head has a bias."""

from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.base import Model, Value
from headrace.models.layers import Biased, Embedding, Group, Linear, Norm, Sinusoids
from headrace.ops.vocabulary import act, attention, embed, head, linear, norm, residual, store, tap


class MarianLayer(Group):
    def __init__(self, c: ModelConfig, layer: LayerConfig) -> None:
        self.qkv = Linear(c.hidden_size, layer.qkv, bias=True, split=True, rows="heads")
        self.out = Linear(layer.q_size, c.hidden_size, bias=True, columns="heads")
        self.attn_norm = Norm(c.hidden_size, c.norm_eps, "layer", bias=True)
        self.up = Linear(c.hidden_size, layer.ffn, bias=True, rows="ffn")
        self.down = Linear(layer.ffn, c.hidden_size, bias=True, columns="ffn")
        self.mlp_norm = Norm(c.hidden_size, c.norm_eps, "layer", bias=True)

    def mlp(self, x: Value, kind: str, ctx: Any) -> Value:
        return norm(residual(x, linear(act(linear(x, self.up, ctx), kind), self.down, ctx)), self.mlp_norm)


class MarianDecoderLayer(MarianLayer):
    def __init__(self, c: ModelConfig, layer: LayerConfig) -> None:
        super().__init__(c, layer)
        self.cross_q = Linear(c.hidden_size, layer.q_size, bias=True, rows="heads")
        self.cross_kv = Linear(c.hidden_size, dict.fromkeys("kv", layer.kv_size), bias=True, split=True, rows="heads")
        self.cross_out = Linear(layer.q_size, c.hidden_size, bias=True, columns="heads")
        self.cross_norm = Norm(c.hidden_size, c.norm_eps, "layer", bias=True)


class MarianEncoder(Model):
    def __init__(self, config: ModelConfig, tokens: Embedding) -> None:
        super().__init__(config)
        self.tokens = tokens
        self.positions = Sinusoids(config.max_position, config.hidden_size)
        self.layers = [MarianLayer(config, layer) for layer in config.layers]

    def embed(self, ctx: Any) -> Value:
        return embed(ctx.ids, self.tokens, scale=self.config.embed_scale, pos=self.positions, positions=ctx.positions)

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        block = self.layers[i]
        q, k, v = linear(x, block.qkv, ctx)
        x = norm(residual(x, linear(attention(q, k, v, ctx, i, causal=False), block.out, ctx)), block.attn_norm)
        return block.mlp(x, self.config.activation, ctx)

    def final(self, x: Value) -> Value:
        return x  # the last layer's norm was the last


class Marian(Model):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.source is not None
        self.tokens = Embedding(config.vocab_size, config.hidden_size, rows="vocab")
        self.encoder = MarianEncoder(config.source, self.tokens)
        self.positions = Sinusoids(config.max_position, config.hidden_size)
        self.layers = [MarianDecoderLayer(config, layer) for layer in config.layers]
        self.output = Biased(self.tokens, config.never)

    def embed(self, ctx: Any) -> Value:
        return embed(ctx.ids, self.tokens, scale=self.config.embed_scale, pos=self.positions, positions=ctx.positions)

    def cross(self, i: int, memory: Value, ctx: Any) -> Value:
        k, v = linear(memory, self.layers[i].cross_kv, ctx)
        return store(k, v, ctx, i)

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        block = self.layers[i]
        q, k, v = linear(x, block.qkv, ctx)
        x = norm(residual(x, linear(attention(q, k, v, ctx, i), block.out, ctx)), block.attn_norm)
        read = attention(linear(x, block.cross_q, ctx), None, None, ctx, i, source=True)
        x = norm(residual(x, linear(read, block.cross_out, ctx)), block.cross_norm)
        return tap(block.mlp(x, self.config.activation, ctx), f"layer.{i}", ctx)

    def head(self, x: Value) -> Value:
        return head(x, self.output)

    def final(self, x: Value) -> Value:
        return x
