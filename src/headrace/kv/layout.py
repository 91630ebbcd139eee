"""Layout of a model's K/V: the shape of its pool and the bytes of a block, for pools, memory plans and `headrace fit`."""

from typing import NamedTuple

from headrace.data.config import ModelConfig

# The native core stores K/V in pages of PAGE tokens of one head, with the head size padded to a multiple of LANES.
PAGE, LANES = 16, 16
# Bits of a number, and bytes of the scales of a page (K and V together).
KV_FORMATS = {"float32": (32, 0), "bfloat16": (16, 0), "int8": (8, 128), "int4": (4, 192)}


class KVShape(NamedTuple):
    """K/V of one token: `heads` vectors of `head_dim` for K and as many for V, in each of `layers` layers with their own
    K/V."""

    layers: int
    heads: int
    head_dim: int

    def block_bytes(self, block_size: int, element_bytes: int) -> int:
        """Bytes of a block of `block_size` tokens with `element_bytes` per element, without padding."""
        return 2 * self.layers * self.heads * self.head_dim * block_size * element_bytes

    def native_block_bytes(self, block_size: int, kv_dtype: str) -> int:
        """Bytes of a block of `block_size` tokens in the native core: whole pages, with padding and scales."""
        return self.layers * self.heads * 2 * vector_bytes(self.head_dim, kv_dtype) * block_size // PAGE


def vector_bytes(width: int, kv_dtype: str) -> int:
    """Bytes of PAGE vectors of `width` numbers (K or V of one head in a page), with padding and scales.

    Raises ValueError for an unknown format.
    """
    if kv_dtype not in KV_FORMATS:
        raise ValueError(f"unknown number format {kv_dtype!r} of K and V; choose {', '.join(KV_FORMATS)}")
    bits, scales = KV_FORMATS[kv_dtype]
    return (-(-width // LANES) * LANES * PAGE * bits) // 8 + scales // 2


class KVPlace(NamedTuple):
    """Where the K/V of a layer are: the number of the pool, and of the layer in it."""

    pool: int
    layer: int


def kv_places(config: ModelConfig, window: int) -> list[KVPlace]:
    """The places of the K/V that each of the model's layers reads.

    Layers with a window of at most `window` tokens are in pool 1. A layer that reads another's K/V has that layer's place.
    """
    counts, places = [0, 0], list[KVPlace]()
    for layer in config.layers:
        if layer.kv_from is not None:
            places.append(places[layer.kv_from])
            continue
        pool = int(layer.window is not None and layer.window <= window)
        places.append(KVPlace(pool, counts[pool]))
        counts[pool] += 1
    return places


def kv_shapes(config: ModelConfig, window: int) -> list[KVShape]:
    """The shapes of a model's pools: one, or two with a window."""
    shape, places = kv_shape(config), set(kv_places(config, window))
    return [shape._replace(layers=sum(place.pool == pool for place in places)) for pool in range(2 if window else 1)]


def kv_shape(config: ModelConfig) -> KVShape:
    """The shape of a model's pool, if it has one for all layers. Raises ValueError if layers differ in theirs."""
    shapes = {(layer.kv_heads, layer.head_dim) for layer in config.layers} or {(1, 1)}
    if len(shapes) > 1:
        raise ValueError(f"a pool holds K and V of one shape, and this {config.architecture} has {sorted(shapes)}")
    return KVShape(len(config.kv_layers), *shapes.pop())
