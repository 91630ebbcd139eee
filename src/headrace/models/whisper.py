"""Whisper: an encoder of log-mel rows with two convolutions, and a decoder with learned positions; norms before each branch.

Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision", arXiv 2212.04356.
"""

from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.base import Model, Value
from headrace.models.layers import Embedding, Group, Linear, Norm
from headrace.ops.vocabulary import act, attention, embed, head, linear, norm, residual, store, tap


class WhisperLayer(Group):
    """Self-attention and MLP. Keys have no bias."""

    def __init__(self, c: ModelConfig, layer: LayerConfig) -> None:
        self.attn_norm = Norm(c.hidden_size, c.norm_eps, "layer", bias=True)
        self.qkv = Linear(c.hidden_size, layer.qkv, bias=True, unbiased=("k",), split=True, rows="heads")
        self.out = Linear(layer.q_size, c.hidden_size, bias=True, columns="heads")
        self.mlp_norm = Norm(c.hidden_size, c.norm_eps, "layer", bias=True)
        self.up = Linear(c.hidden_size, layer.ffn, bias=True, rows="ffn")
        self.down = Linear(layer.ffn, c.hidden_size, bias=True, columns="ffn")

    def attend(self, i: int, x: Value, ctx: Any, causal: bool) -> Value:
        """The rows after self-attention."""
        q, k, v = linear(norm(x, self.attn_norm), self.qkv, ctx)
        return residual(x, linear(attention(q, k, v, ctx, i, causal=causal), self.out, ctx))

    def mlp(self, x: Value, ctx: Any) -> Value:
        return residual(x, linear(act(linear(norm(x, self.mlp_norm), self.up, ctx), "gelu"), self.down, ctx))


class WhisperDecoderLayer(WhisperLayer):
    def __init__(self, c: ModelConfig, layer: LayerConfig) -> None:
        super().__init__(c, layer)
        kv = dict.fromkeys("kv", layer.kv_size)
        self.cross_norm = Norm(c.hidden_size, c.norm_eps, "layer", bias=True)
        self.cross_q = Linear(c.hidden_size, layer.q_size, bias=True, rows="heads")
        self.cross_kv = Linear(c.hidden_size, kv, bias=True, unbiased=("k",), split=True, rows="heads")
        self.cross_out = Linear(layer.q_size, c.hidden_size, bias=True, columns="heads")


class WhisperEncoder(Model):
    """Its first rows are `convolve(1, patches(convolve(0, patches(log-mel rows))))` plus `positions`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.audio is not None
        self.conv1 = Linear(config.audio.taps * config.audio.bins, config.hidden_size, bias=True)
        self.conv2 = Linear(config.audio.taps * config.hidden_size, config.hidden_size, bias=True)
        self.positions = Embedding(config.audio.positions, config.hidden_size)
        self.layers = [WhisperLayer(config, layer) for layer in config.layers]
        self.norm = Norm(config.hidden_size, config.norm_eps, "layer", bias=True)

    def convolve(self, i: int, x: Value, ctx: Any) -> Value:
        return act(linear(x, (self.conv1, self.conv2)[i], ctx), "gelu")

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        return self.layers[i].mlp(self.layers[i].attend(i, x, ctx, causal=False), ctx)


class Whisper(Model):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.source is not None
        self.encoder = WhisperEncoder(config.source)
        self.tokens = Embedding(config.vocab_size, config.hidden_size, rows="vocab")
        self.positions = Embedding(config.max_position, config.hidden_size)
        self.layers = [WhisperDecoderLayer(config, layer) for layer in config.layers]
        self.norm = Norm(config.hidden_size, config.norm_eps, "layer", bias=True)

    def embed(self, ctx: Any) -> Value:
        return embed(ctx.ids, self.tokens, pos=self.positions, positions=ctx.positions)

    def cross(self, i: int, memory: Value, ctx: Any) -> Value:
        k, v = linear(memory, self.layers[i].cross_kv, ctx)
        return store(k, v, ctx, i)

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        block = self.layers[i]
        x = block.attend(i, x, ctx, causal=True)
        # Alignment of words reads the queries.
        query = tap(linear(norm(x, block.cross_norm), block.cross_q, ctx), f"cross.{i}", ctx)
        read = attention(query, None, None, ctx, i, source=True)
        x = block.mlp(residual(x, linear(read, block.cross_out, ctx)), ctx)
        return tap(x, f"layer.{i}", ctx)

    def head(self, x: Value) -> Value:
        return head(norm(x, self.norm), self.tokens)
