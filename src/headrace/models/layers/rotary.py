"""`Rotary`: frequencies of rotary position embeddings."""

import math

import numpy as np

from headrace.data.config import ModelConfig, RopeConfig
from headrace.models.layers.holder import Allocator, Holder, Tensor


class Rotary(Holder):
    """The frequencies of one RopeConfig for heads of `head_dim`; `inv_freq` [dim / 2] float64, radians per position."""

    inv_freq: Tensor

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self.config = config
        self.dim = config.dim or head_dim
        self.interleaved = config.interleaved
        if self.dim % 2 or not 0 < self.dim <= head_dim:
            raise ValueError(f"rotary needs an even number of values, at most head_dim {head_dim}, not {self.dim}")

    def create(self, allocator: Allocator) -> None:
        self.inv_freq = allocator.constant(self.frequencies)

    @property
    def frequencies(self) -> np.ndarray:
        return frequencies(self.config, self.dim)


def rotaries(config: ModelConfig) -> list[Rotary | None]:
    """The Rotary of each layer, None without rotation. Layers with equal settings share one object."""
    kinds = [(layer.rope, layer.head_dim) for layer in config.layers]
    made = {(rope, head_dim): Rotary(rope, head_dim) if rope else None for rope, head_dim in set(kinds)}
    return [made[kind] for kind in kinds]


def frequencies(config: RopeConfig, dim: int) -> np.ndarray:
    """Radians per position, [dim / 2] float64. Raises ValueError for an unknown scaling."""
    base = np.array([config.theta ** -(pair / dim) for pair in range(0, dim, 2)])
    if config.scaling == "none":
        return base
    if config.scaling == "linear":
        return base / config.factor
    if config.scaling == "llama3":
        return _llama3(base, config)
    if config.scaling == "divisors":
        if len(config.divisors) != dim // 2:
            raise ValueError(f"rotary needs {dim // 2} divisors, one per frequency, not {len(config.divisors)}")
        return base / np.array(config.divisors)
    raise ValueError(f"unknown rotary scaling {config.scaling!r}; known are none, linear, llama3 and divisors")


def _llama3(base: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Llama 3.1 scaling: short wavelengths are unchanged, long ones grow by `factor`, and those between are blended."""
    turns = config.original_context * base / (2 * math.pi)  # in the original context
    keep = np.clip((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor), 0.0, 1.0)
    blended: np.ndarray = keep * base + (1 - keep) * base / config.factor
    return blended
