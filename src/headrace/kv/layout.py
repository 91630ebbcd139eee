"""Layout of a model's K/V: the shape of its pool and the bytes of a block, for pools, memory plans and `headrace fit`."""

from collections import Counter
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
    """The shapes of a model's pools: one, or two with a window. Raises ValueError if K/V of one pool differ in size."""
    places, counts = kv_places(config, window), [Counter[tuple[int, int]]() for _ in range(2 if window else 1)]
    for number in config.kv_layers:
        layer = config.layers[number]
        counts[places[number].pool][layer.kv_heads, layer.head_dim] += 1
    for sizes in counts:
        if len(sizes) > 1:
            raise ValueError(
                f"a pool holds K and V of one shape, and this {config.architecture} has {sorted(sizes)} (heads, head size) in "
                "one; only layers with a window may differ from the others, in the model that generates"
            )
    usual = min(config.kv_sizes, default=(1, 1))  # of a pool without layers
    return [KVShape(sizes.total(), *next(iter(sizes), usual)) for sizes in counts]


def kv_shape(config: ModelConfig) -> KVShape:
    """The shape of a model's pool, if it has one for all layers. Raises ValueError if layers differ in theirs."""
    (shape,) = kv_shapes(config, 0)
    return shape


def all_kv_shapes(config: ModelConfig) -> list[KVShape]:
    """The K/V of all layers whatever their pools, for sums of bytes: one shape for each size."""
    sizes = Counter((config.layers[number].kv_heads, config.layers[number].head_dim) for number in config.kv_layers)
    return [KVShape(count, *size) for size, count in sizes.items()]
