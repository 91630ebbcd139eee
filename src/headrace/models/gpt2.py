"""GPT-2: learned positions, LayerNorm, multi-head attention, a plain GELU MLP, biases everywhere."""

from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.base import Model, Value
from headrace.models.layers import Embedding, Group, Linear, Norm
from headrace.ops.vocabulary import act, attention, embed, head, linear, norm, residual, tap


class GPT2Layer(Group):
    def __init__(self, c: ModelConfig, layer: LayerConfig) -> None:
        self.attn_norm = Norm(c.hidden_size, c.norm_eps, "layer", bias=True)
        self.qkv = Linear(c.hidden_size, layer.qkv, bias=True, split=True, rows="heads")
        self.out = Linear(layer.q_size, c.hidden_size, bias=True, columns="heads")
        self.mlp_norm = Norm(c.hidden_size, c.norm_eps, "layer", bias=True)
        self.up = Linear(c.hidden_size, layer.ffn, bias=True, rows="ffn")
        self.down = Linear(layer.ffn, c.hidden_size, bias=True, columns="ffn")


class GPT2(Model):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.tokens = Embedding(config.vocab_size, config.hidden_size, rows="vocab")
        self.positions = Embedding(config.max_position, config.hidden_size)
        self.layers = [GPT2Layer(config, layer) for layer in config.layers]
        self.norm = Norm(config.hidden_size, config.norm_eps, "layer", bias=True)
        self.output = self.tokens if config.tied_head else Linear(config.hidden_size, config.vocab_size, rows="vocab")

    def embed(self, ctx: Any) -> Value:
        return embed(ctx.ids, self.tokens, pos=self.positions, positions=ctx.positions)

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        block = self.layers[i]
        q, k, v = linear(norm(x, block.attn_norm), block.qkv, ctx)
        x = residual(x, linear(attention(q, k, v, ctx, i), block.out, ctx))
        x = residual(x, linear(act(linear(norm(x, block.mlp_norm), block.up, ctx), "gelu_tanh"), block.down, ctx))
        return tap(x, f"layer.{i}", ctx)

    def head(self, x: Value) -> Value:
        return head(norm(x, self.norm), self.output)
