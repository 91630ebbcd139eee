"""OLMo 2 and 3, EXAONE 4: norms after each branch and none before it; queries and keys are normed by head or as a whole."""

from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.base import Value
from headrace.models.layers import Group, Linear, Norm
from headrace.models.llama import Llama
from headrace.ops.vocabulary import attention, linear, norm, residual, tap


class Olmo2Layer(Group):
    def __init__(self, c: ModelConfig, layer: LayerConfig) -> None:
        wide = c.wide_qk_norm
        self.qkv = Linear(c.hidden_size, layer.qkv, bias=c.qkv_bias, split=True, rows="heads")
        self.q_norm = Norm(layer.q_size if wide else layer.head_dim, c.norm_eps)
        self.k_norm = Norm(layer.kv_size if wide else layer.head_dim, c.norm_eps)
        self.out = Linear(layer.q_size, c.hidden_size, bias=c.out_bias, columns="heads")
        self.attn_post_norm = Norm(c.hidden_size, c.norm_eps)
        self.gate_up = Linear(c.hidden_size, {"gate": layer.ffn, "up": layer.ffn}, bias=c.mlp_bias, rows="ffn")
        self.down = Linear(layer.ffn, c.hidden_size, bias=c.mlp_bias, columns="ffn")
        self.mlp_post_norm = Norm(c.hidden_size, c.norm_eps)


class Olmo2(Llama):
    layer_type = Olmo2Layer

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        c, block = self.config, self.layers[i]
        q, k, v = linear(x, block.qkv, ctx)
        norms = {"q_norm": block.q_norm, "k_norm": block.k_norm}
        if c.wide_qk_norm:
            q, k, norms = norm(q, block.q_norm), norm(k, block.k_norm), {}
        attended = attention(q, k, v, ctx, i, rope=self.ropes[i], window=c.layers[i].window, **norms)
        x = residual(x, linear(attended, block.out, ctx), block.attn_post_norm)
        return tap(residual(x, self.mlp(block, x, ctx), block.mlp_post_norm), f"layer.{i}", ctx)
