"""`Model`: the interface of every architecture. Runners execute its segments: embed, layers a to b, head of some rows."""

from typing import Any

from headrace.data.config import ModelConfig
from headrace.models.layers import Group
from headrace.ops.vocabulary import norm

# A tensor, or a recorder's symbolic value.
Value = Any


class Model(Group):
    """A model as pure functions of values.

    A new model has no tensors until weights.loader creates and fills its holders. layers: one group of weights per layer. norm:
    before the head; None if there is none. encoder: of an encoder-decoder. positions: added to the rows of the convolutions, of
    an encoder that reads sound.
    """

    layers: Any
    norm: Any = None
    encoder: "Model | None" = None
    positions: Any = None

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def embed(self, ctx: Any) -> Value:
        """ctx.ids [n] -> hidden rows [n, hidden]."""
        raise NotImplementedError

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        """Layer i: hidden rows [n, hidden] -> [n, hidden]; writes the rows' K and V into ctx.pool."""
        raise NotImplementedError

    def cross(self, i: int, memory: Value, ctx: Any) -> Value:
        """Of an encoder-decoder: store layer i's cross-attention K and V of the encoder's rows `memory` in ctx.pool."""
        raise NotImplementedError

    def convolve(self, i: int, x: Value, ctx: Any) -> Value:
        """Of an encoder that reads sound: convolution i of rows that lie side by side (`ops.patches`), [n, taps * width] -> [n,
        hidden]."""
        raise NotImplementedError

    def head(self, x: Value) -> Value:
        """Final norm and output projection of any rows x [r, hidden] -> logits [r, vocabulary], float32 or wider."""
        raise NotImplementedError

    def final(self, x: Value) -> Value:
        """Rows after the last layer -> rows for embeddings, after the final norm."""
        return norm(x, self.norm)

    def __call__(self, ctx: Any) -> Value:
        """Logits of every row of the step, for tests and scoring; runners select rows before `head`."""
        x = self.embed(ctx)
        for i in range(self.config.num_layers):
            x = self.layer(i, x, ctx)
        return self.head(x)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, filled or not. A tied head counts once."""
        return sum(spec.elements for _, holder in self.holders() for spec in holder.params().values())
