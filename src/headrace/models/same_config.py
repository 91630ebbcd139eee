"""Comparison of two configs of a model, as read from two containers."""

import math
from dataclasses import fields, replace

import numpy as np

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.layers import frequencies

# Metadata of GGUF files is float32.
RELATIVE = 1e-6


def differing_settings(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Names of the settings that differ by more than the rounding to float32. Rotary scalings are compared by the frequencies,
    divisors and amplitude that they give."""
    return [key.name for key in fields(one) if not _same(one, other, key.name)]


def _same(config: ModelConfig, read: ModelConfig, key: str) -> bool:
    one, other = getattr(config, key), getattr(read, key)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=RELATIVE)
    if key != "layers":
        return bool(one == other)
    return len(one) == len(other) and all(map(_same_layer, one, other))


def _same_layer(one: LayerConfig, other: LayerConfig) -> bool:
    if replace(one, rope=None) != replace(other, rope=None) or (one.rope is None) != (other.rope is None):
        return False
    if one.rope is None or other.rope is None:
        return True
    ropes, width = (one.rope, other.rope), one.head_dim
    rest = [(rope.dim or width, rope.interleaved, rope.growth, len(rope.short)) for rope in ropes]
    first, second = (np.array([*frequencies(rope, rope.dim or width), *rope.short, rope.amplitude]) for rope in ropes)
    return rest[0] == rest[1] and np.allclose(first, second, rtol=RELATIVE, atol=0)
