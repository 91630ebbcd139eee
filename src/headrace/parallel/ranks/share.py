"""Share of a model on one rank: query heads, K/V heads, MLP columns and vocabulary rows.

A layer that is cut along its inputs is summed in eight fixed segments, whatever the number of ranks, and a rank owns
consecutive segments. Therefore the sums, and so the outputs, do not depend on the number of ranks.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from headrace.data.config import LayerConfig, ModelConfig

WORLDS = (1, 2, 4, 8)
# Columns of a unit of the fixed segments, and tokens of a block of logits. Heads larger than a unit, or not a divisor of it,
# have the least common multiple.
UNIT = 64


@dataclass(frozen=True, slots=True)
class LayerShare:
    """A rank's part of one layer, as ranges of the model's heads and columns.

    kv_heads: every K/V head that one of `heads` reads; ranks that share a K/V head each store its K/V. group: query heads of a
    K/V head in the whole model. first: query heads of the rank's first K/V head that the rank before it holds.
    """

    heads: range
    kv_heads: range
    head_dim: int
    ffn: range
    group: int
    first: int

    def cut(self, axis: str, part: str = "") -> range:
        """Rows or columns of an axis (heads or ffn) that the rank holds. part: q, k or v of an axis of heads; default q."""
        if axis == "ffn":
            return self.ffn
        heads = self.kv_heads if part in ("k", "v") else self.heads
        return range(heads.start * self.head_dim, heads.stop * self.head_dim)


@dataclass(frozen=True)
class Share:
    """The part of a model that rank `rank` of `world` holds. config: of the model as one rank has it."""

    rank: int
    world: int
    config: ModelConfig

    @cached_property
    def layers(self) -> tuple[LayerShare, ...]:
        """The shares of the layers."""
        return tuple(map(self._layer, self.config.layers))

    @cached_property
    def vocab(self) -> range:
        """Token ids whose rows of the embedding and of the head are on this rank."""
        return self.portion(self.config.vocab_size)

    @property
    def borders(self) -> list[int]:
        """First token id of each rank, and the size of the vocabulary."""
        ranks = (Share(rank, self.world, self.config) for rank in range(self.world))
        return [*(share.vocab.start for share in ranks), self.config.vocab_size]

    def portion(self, size: int, unit: int = UNIT) -> range:
        """This rank's part of `size` rows or columns, in whole units except for the last."""
        units = -(-size // unit)
        first, last = self.rank * units // self.world, (self.rank + 1) * units // self.world
        return range(min(first * unit, size), min(last * unit, size))

    def narrowed(self) -> ModelConfig:
        """The config of the rank's model: fewer heads and narrower MLPs; the vocabulary keeps its size."""
        layers = (
            replace(layer, heads=len(part.heads), kv_heads=len(part.kv_heads), ffn=len(part.ffn))
            for layer, part in zip(self.config.layers, self.layers, strict=True)
        )
        return replace(self.config, layers=tuple(layers))

    def _layer(self, layer: LayerConfig) -> LayerShare:
        columns = self.portion(layer.q_size, head_unit(layer.head_dim))
        heads = range(columns.start // layer.head_dim, columns.stop // layer.head_dim)
        group = layer.heads // layer.kv_heads
        held = range(heads.start // group, -(-heads.stop // group)) if heads else range(0)
        return LayerShare(heads, held, layer.head_dim, self.portion(layer.ffn), group, heads.start - held.start * group)


def head_unit(head_dim: int) -> int:
    """Columns of a unit of the segments of attention's output projection: whole heads and whole tiles."""
    return math.lcm(head_dim, UNIT)


def unsupported_world(config: ModelConfig, world: int) -> str:
    """Why a model cannot be shared by `world` ranks, with what to do; empty if it can."""
    if world not in WORLDS:
        return f"tp must be 1, 2, 4 or 8, not {world}"
    for at, layer in enumerate(config.layers):
        if layer.heads != config.layers[read := config.kv_layer(at)].heads:
            return f"layer {at} reads the K/V of layer {read}, which has another number of heads; leave tp out"
        for what, size, unit in (
            (f"{layer.heads} heads of {layer.head_dim}", layer.q_size, head_unit(layer.head_dim)),
            (f"an MLP of {layer.ffn} columns", layer.ffn, UNIT),
        ):
            if (units := -(-size // unit)) < world:
                most = max(each for each in WORLDS if each <= units)
                return f"layer {at} has {what}, which are {units} units of {unit} columns; use tp={most}"
    if (units := -(-config.vocab_size // UNIT)) < world:
        return f"the vocabulary of {config.vocab_size} tokens is {units} units of {UNIT}; use a smaller tp"
    return ""
