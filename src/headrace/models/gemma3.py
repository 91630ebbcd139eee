"""Gemma 2 and 3 (text), EmbeddingGemma, GLM-4: norms before and after each branch, softcaps, windows and rotary settings by
layer."""

from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.base import Model, Value
from headrace.models.layers import Embedding, Group, Linear, Norm, rotaries
from headrace.ops.vocabulary import act_mul, attention, embed, head, linear, norm, residual, tap


class Gemma3Layer(Group):
    def __init__(self, c: ModelConfig, layer: LayerConfig) -> None:
        self.attn_norm = Norm(c.hidden_size, c.norm_eps)
        self.qkv = Linear(c.hidden_size, layer.qkv, bias=c.qkv_bias, split=True, rows="heads")
        self.q_norm = Norm(layer.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = Norm(layer.head_dim, c.norm_eps) if c.qk_norm and layer.kv_from is None else None
        self.out = Linear(layer.q_size, c.hidden_size, bias=c.out_bias, columns="heads")
        self.attn_post_norm = Norm(c.hidden_size, c.norm_eps)
        self.mlp_norm = Norm(c.hidden_size, c.norm_eps)
        self.gate_up = Linear(c.hidden_size, {"gate": layer.ffn, "up": layer.ffn}, rows="ffn")
        self.down = Linear(layer.ffn, c.hidden_size, columns="ffn")
        self.mlp_post_norm = Norm(c.hidden_size, c.norm_eps)


class Gemma3(Model):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.tokens = Embedding(config.vocab_size, config.hidden_size, rows="vocab")
        self.ropes = rotaries(config)
        self.layers = [Gemma3Layer(config, layer) for layer in config.layers]
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.output = self.tokens if config.tied_head else Linear(config.hidden_size, config.vocab_size, rows="vocab")

    def embed(self, ctx: Any) -> Value:
        return embed(ctx.ids, self.tokens, scale=self.config.embed_scale)

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        c, block = self.config, self.layers[i]
        q, *own = linear(norm(x, block.attn_norm), block.qkv, ctx)
        k, v = own or (None, None)
        attended = attention(
            q,
            k,
            v,
            ctx,
            i,
            rope=self.ropes[i],
            q_norm=block.q_norm,
            k_norm=block.k_norm,
            window=c.layers[i].window,
            scale=c.attn_scale,
            softcap=c.attn_softcap,
            causal=not c.encoder,
        )
        x = residual(x, linear(attended, block.out, ctx), block.attn_post_norm)
        branch = linear(act_mul(linear(norm(x, block.mlp_norm), block.gate_up, ctx), c.activation), block.down, ctx)
        return tap(residual(x, branch, block.mlp_post_norm), f"layer.{i}", ctx)

    def head(self, x: Value) -> Value:
        return head(norm(x, self.norm), self.output, softcap=self.config.logit_softcap)
