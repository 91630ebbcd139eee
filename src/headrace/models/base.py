"""Model: what every architecture offers. Runners execute segments of it: embed, layers a to b, head of some rows."""

from typing import Any

from headrace.data.config import ModelConfig
from headrace.models.layers.holder import Group
from headrace.ops.vocabulary import norm

Value = Any  # a tensor, or whatever a recorder passes through a model file


class Model(Group):
    """A decoder as pure functions of values. `layers` holds one group of weights per layer.

    A new model is a description: it has no tensors until each holder is created and filled (weights.loader does both).
    """

    layers: Any  # a list of the file's own Block
    norm: Any = None  # the Norm before the head; an encoder, which has no head, has none
    encoder: "Model | None" = None  # of an encoder-decoder: what reads the source

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def embed(self, ctx: Any) -> Value:
        """ctx.ids [n] -> hidden rows [n, hidden]."""
        raise NotImplementedError

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        """Layer i: hidden rows [n, hidden] -> [n, hidden]; writes the rows' K and V into ctx.pool."""
        raise NotImplementedError

    def cross(self, i: int, memory: Value, ctx: Any) -> Value:
        """Of an encoder-decoder: what layer i attends to of the encoder's rows `memory`, stored in ctx.pool."""
        raise NotImplementedError

    def head(self, x: Value) -> Value:
        """Final norm and output projection of any rows x [r, hidden] -> logits [r, vocabulary], float32 or wider."""
        raise NotImplementedError

    def final(self, x: Value) -> Value:
        """Rows after the last layer -> the rows that embeddings are pooled from: normed as the head's are."""
        return norm(x, self.norm)

    def __call__(self, ctx: Any) -> Value:
        """Logits of every row of the step: all segments in a row (tests and scoring; runners pick rows before `head`)."""
        x = self.embed(ctx)
        for i in range(self.config.num_layers):
            x = self.layer(i, x, ctx)
        return self.head(x)

    @property
    def num_parameters(self) -> int:
        """Numbers the model has, filled or not; a tied head counts once."""
        return sum(spec.elements for _, holder in self.holders() for spec in holder.params().values())
