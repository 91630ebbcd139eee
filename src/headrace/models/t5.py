"""T5 (v1.0 and v1.1, Flan-T5): an encoder-decoder with relative positions, norms before each branch, and no biases."""

from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.base import Model, Value
from headrace.models.layers import Embedding, Group, Linear, Norm, Relative
from headrace.ops.vocabulary import act, act_mul, attention, embed, head, linear, norm, residual, store, tap


class T5Layer(Group):
    def __init__(self, c: ModelConfig, layer: LayerConfig) -> None:
        self.gated = c.gated
        self.attn_norm = Norm(c.hidden_size, c.norm_eps)
        self.qkv = Linear(c.hidden_size, layer.qkv, split=True, rows="heads")
        self.out = Linear(layer.q_size, c.hidden_size, columns="heads")
        self.mlp_norm = Norm(c.hidden_size, c.norm_eps)
        self.up = Linear(c.hidden_size, {"gate": layer.ffn, "up": layer.ffn} if c.gated else layer.ffn, rows="ffn")
        self.down = Linear(layer.ffn, c.hidden_size, columns="ffn")

    def mlp(self, x: Value, kind: str, ctx: Any) -> Value:
        wide = linear(norm(x, self.mlp_norm), self.up, ctx)
        return residual(x, linear(act_mul(wide, kind) if self.gated else act(wide, kind), self.down, ctx))


class T5DecoderLayer(T5Layer):
    def __init__(self, c: ModelConfig, layer: LayerConfig) -> None:
        super().__init__(c, layer)
        self.cross_norm = Norm(c.hidden_size, c.norm_eps)
        self.cross_q = Linear(c.hidden_size, layer.q_size, rows="heads")
        self.cross_kv = Linear(c.hidden_size, dict.fromkeys("kv", layer.kv_size), split=True, rows="heads")
        self.cross_out = Linear(layer.q_size, c.hidden_size, columns="heads")


class Half(Model):
    """What encoder and decoder have in common. Scores are not scaled; all layers share one table of relative positions."""

    def __init__(self, config: ModelConfig, tokens: Embedding, block: type[T5Layer]) -> None:
        super().__init__(config)
        self.tokens = tokens
        self.relative = Relative(config.buckets, config.each_layer.heads, config.bucket_distance, both=config.encoder)
        self.layers = [block(config, layer) for layer in config.layers]
        self.norm = Norm(config.hidden_size, config.norm_eps)

    def embed(self, ctx: Any) -> Value:
        return embed(ctx.ids, self.tokens)

    def attend(self, i: int, x: Value, ctx: Any) -> Value:
        """The rows after the branch of attention to one another."""
        block = self.layers[i]
        q, k, v = linear(norm(x, block.attn_norm), block.qkv, ctx)
        causal = not self.config.encoder
        return residual(x, linear(attention(q, k, v, ctx, i, scale=1.0, causal=causal, bias=self.relative), block.out, ctx))


class T5Encoder(Half):
    def __init__(self, config: ModelConfig, tokens: Embedding) -> None:
        super().__init__(config, tokens, T5Layer)

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        return self.layers[i].mlp(self.attend(i, x, ctx), self.config.activation, ctx)


class T5(Half):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, Embedding(config.vocab_size, config.hidden_size, rows="vocab"), T5DecoderLayer)
        assert config.source is not None
        self.encoder = T5Encoder(config.source, self.tokens)
        self.output = self.tokens if config.tied_head else Linear(config.hidden_size, config.vocab_size, rows="vocab")

    def cross(self, i: int, memory: Value, ctx: Any) -> Value:
        k, v = linear(memory, self.layers[i].cross_kv, ctx)
        return store(k, v, ctx, i)

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        block, x = self.layers[i], self.attend(i, x, ctx)
        read = attention(linear(norm(x, block.cross_norm), block.cross_q, ctx), None, None, ctx, i, scale=1.0, source=True)
        x = block.mlp(residual(x, linear(read, block.cross_out, ctx)), self.config.activation, ctx)
        return tap(x, f"layer.{i}", ctx)

    def head(self, x: Value) -> Value:
        return head(norm(x, self.norm), self.output, scale=self.config.head_scale)
