"""ModernBERT: an encoder with norms before each branch, rotary positions, gated MLPs, and windows in most layers."""

from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.base import Model, Value
from headrace.models.layers import Embedding, Group, Linear, Norm, rotaries
from headrace.ops.vocabulary import act_mul, attention, embed, linear, norm, residual, tap


class ModernBertLayer(Group):
    def __init__(self, c: ModelConfig, layer: LayerConfig, normed: bool) -> None:
        self.attn_norm = Norm(c.hidden_size, c.norm_eps, "layer") if normed else None
        self.qkv = Linear(c.hidden_size, layer.qkv, bias=c.qkv_bias, split=True, rows="heads")
        self.out = Linear(layer.q_size, c.hidden_size, bias=c.out_bias, columns="heads")
        self.mlp_norm = Norm(c.hidden_size, c.norm_eps, "layer")
        self.gate_up = Linear(c.hidden_size, {"gate": layer.ffn, "up": layer.ffn}, bias=c.mlp_bias, rows="ffn")
        self.down = Linear(layer.ffn, c.hidden_size, bias=c.mlp_bias, columns="ffn")


class ModernBert(Model):
    """The first layer has no norm before attention: the embeddings are normed."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.tokens = Embedding(config.vocab_size, config.hidden_size, rows="vocab")
        self.embed_norm = Norm(config.hidden_size, config.norm_eps, "layer")
        self.ropes = rotaries(config)
        self.layers = [ModernBertLayer(config, layer, i > 0) for i, layer in enumerate(config.layers)]
        self.norm = Norm(config.hidden_size, config.norm_eps, "layer")

    def embed(self, ctx: Any) -> Value:
        return norm(embed(ctx.ids, self.tokens), self.embed_norm)

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        block = self.layers[i]
        before = x if block.attn_norm is None else norm(x, block.attn_norm)
        q, k, v = linear(before, block.qkv, ctx)
        window = self.config.layers[i].window
        attended = attention(q, k, v, ctx, i, rope=self.ropes[i], window=window, causal=False)
        x = residual(x, linear(attended, block.out, ctx))
        wide = linear(norm(x, block.mlp_norm), block.gate_up, ctx)
        x = residual(x, linear(act_mul(wide, self.config.activation), block.down, ctx))
        return tap(x, f"layer.{i}", ctx)
