"""An order of ops: llama's attention and MLP side by side, both from the rows that the layer begins with."""

from typing import Any

from headrace.models.base import Value
from headrace.models.llama import Llama
from headrace.ops.vocabulary import act_mul, attention, linear, norm, residual


class Parallel(Llama):
    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        block = self.layers[i]
        q, k, v = linear(norm(x, block.attn_norm), block.qkv, ctx)
        attended = linear(attention(q, k, v, ctx, i, rope=self.ropes[i]), block.out, ctx)
        made = linear(act_mul(linear(norm(x, block.mlp_norm), block.gate_up, ctx), "silu"), block.down, ctx)
        return residual(residual(x, attended), made)
