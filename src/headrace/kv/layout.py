"""Layout of a model's K/V: the shape of its pool and the bytes of a block, for pools and memory plans."""

from typing import NamedTuple

from headrace.data.config import ModelConfig


class KVShape(NamedTuple):
    """K/V of one token: `heads` vectors of `head_dim` for K and as many for V, in each of `layers` layers with their own
    K/V."""

    layers: int
    heads: int
    head_dim: int

    def block_bytes(self, block_size: int, element_bytes: int) -> int:
        """Bytes of a block of `block_size` tokens with `element_bytes` per element, without padding."""
        return 2 * self.layers * self.heads * self.head_dim * block_size * element_bytes


def kv_shape(config: ModelConfig) -> KVShape:
    """The shape of a model's pool. Raises ValueError if layers differ in theirs, as one table serves all of them."""
    shapes = {(layer.kv_heads, layer.head_dim) for layer in config.layers} or {(1, 1)}
    if len(shapes) > 1:
        raise ValueError(f"a pool holds K and V of one shape, and this {config.architecture} has {sorted(shapes)}")
    return KVShape(sum(not layer.shares for layer in config.layers), *shapes.pop())
