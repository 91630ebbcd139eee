"""Rotary: how fast each pair of a head's values turns with the position."""

import math
from typing import Any

import torch

from headrace.data.config import ModelConfig, RopeConfig
from headrace.layers.holder import Holder


class Rotary(Holder):
    """The frequencies of one RopeConfig for heads of `head_dim`; `inv_freq` [dim / 2] float64, radians per position."""

    inv_freq: torch.Tensor

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.dim = config.dim or head_dim
        self.interleaved = config.interleaved
        if self.dim % 2 or not 0 < self.dim <= head_dim:
            raise ValueError(f"rotary needs an even number of values, at most head_dim {head_dim}, not {self.dim}")

    def create(self, dtype: torch.dtype) -> None:
        self.inv_freq = frequencies(self.config, self.dim).to(torch.get_default_device())


def rotaries(config: ModelConfig) -> Any:
    """A ModuleList with the Rotary of each layer (None: nothing is turned there), one object for all that turn alike."""
    kinds = [(layer.rope, layer.head_dim) for layer in config.layers]
    made: dict[Any, Any] = {(rope, head_dim): Rotary(rope, head_dim) if rope else None for rope, head_dim in set(kinds)}
    return torch.nn.ModuleList(made[kind] for kind in kinds)


def frequencies(config: RopeConfig, dim: int) -> torch.Tensor:
    """Radians per position of each of dim / 2 pairs, float64 on the CPU. Raises ValueError on an unknown scaling."""
    base = config.theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if config.scaling == "none":
        return base
    if config.scaling == "linear":
        return base / config.factor
    if config.scaling == "llama3":
        return _llama3(base, config)
    if config.scaling == "divisors":
        if len(config.divisors) != dim // 2:
            raise ValueError(f"rotary needs {dim // 2} divisors, one per frequency, not {len(config.divisors)}")
        return base / torch.tensor(config.divisors, dtype=torch.float64, device="cpu")
    raise ValueError(f"unknown rotary scaling {config.scaling!r}; known are none, linear, llama3 and divisors")


def _llama3(base: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Llama 3.1: wavelengths that fit the original context often stay, those that do not fit are stretched by `factor`,
    those between are blended by how often they fit."""
    turns = config.original_context * base / (2 * math.pi)  # in the original context
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * base + (1 - keep) * base / config.factor
