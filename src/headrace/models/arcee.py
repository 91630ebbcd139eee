"""Arcee: Llama with an MLP that has no gate; its activation is the square of ReLU."""

from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.base import Value
from headrace.models.layers import Group, Linear, Norm
from headrace.models.llama import Llama
from headrace.ops.vocabulary import act, linear


class ArceeLayer(Group):
    def __init__(self, c: ModelConfig, layer: LayerConfig) -> None:
        self.attn_norm = Norm(c.hidden_size, c.norm_eps)
        self.qkv = Linear(c.hidden_size, layer.qkv, bias=c.qkv_bias, split=True, rows="heads")
        self.q_norm = self.k_norm = None
        self.out = Linear(layer.q_size, c.hidden_size, bias=c.out_bias, columns="heads")
        self.mlp_norm = Norm(c.hidden_size, c.norm_eps)
        self.up = Linear(c.hidden_size, layer.ffn, bias=c.mlp_bias, rows="ffn")
        self.down = Linear(layer.ffn, c.hidden_size, bias=c.mlp_bias, columns="ffn")


class Arcee(Llama):
    layer_type = ArceeLayer

    def mlp(self, block: Any, x: Value, ctx: Any) -> Value:
        return linear(act(linear(x, block.up, ctx), "relu2"), block.down, ctx)
