"""Checked reading of a model's config: every number has bounds, so a damaged or hostile file fails before any allocation."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.data.config import ModelConfig, RopeConfig
from headrace.weights.source import WeightError, WeightSource

MAX_LAYERS = 1024
MAX_HEAD_DIM = 1 << 16
MAX_SIZE = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads keys of an open file. Errors are WeightErrors of one line.

    place: location in the file, for errors. prefix: of every key.
    """

    architecture: str
    values: Mapping[str, Any]
    source: WeightSource
    place: str
    prefix: str = ""

    def error(self, what: str) -> WeightError:
        return WeightError(f"{self.source.path}: {self.place} {what}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE, least: int = 1) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(f"must have {self.prefix}{key} as an integer from {least} to {most}, not {_shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(f"must have {self.prefix}{key} as a number above 0, not {_shown(value)}")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers above 0."""
        values = self.get(key)
        if not isinstance(values, Sequence) or not all(isinstance(value, (int, float)) and value > 0 for value in values):
            raise self.error(f"must have {self.prefix}{key} as a list of numbers above 0, not {_shown(values)}")
        return tuple(map(float, values))

    def heads(self, key: str, kv_key: str) -> tuple[int, int]:
        """Number of query heads and of KV heads; equal if the file has no `kv_key`."""
        heads = self.size(key)
        kv_heads = self.size(kv_key, heads)
        if heads % kv_heads:
            raise self.error(f"has {heads} heads for {kv_heads} KV heads; the first must be a multiple of the second")
        return heads, kv_heads


def _shown(value: object) -> str:
    return repr(value) if value is None or isinstance(value, (int, float, str)) else f"a list of {len(value)}"  # type: ignore[arg-type]


def windowed(config: ModelConfig, windows: Iterable[int | None], rope: RopeConfig | None = None) -> ModelConfig:
    """The config with a window for each layer (None: all tokens). Layers with a window use `rope`, if given."""
    layers = zip(config.layers, windows, strict=True)
    windowed_layers = (replace(layer, window=window, rope=rope if rope and window else layer.rope) for layer, window in layers)
    return replace(config, layers=tuple(windowed_layers))


def check_rope(rope: RopeConfig, head_dim: int, error: Callable[[str], Exception]) -> RopeConfig:
    """Return the settings. Raises `error` if they do not give finite frequencies for heads of `head_dim`."""
    dim = rope.dim or head_dim
    if dim % 2 or not 0 < dim <= head_dim:
        raise error(f"turns {dim} values of heads of {head_dim}; rotary needs an even number, at most the whole head")
    if rope.scaling == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise error("has a llama3 rotary scaling whose low_freq_factor is not below its high_freq_factor")
    if rope.scaling == "yarn" and rope.theta <= 1:
        raise error(f"has a yarn rotary scaling, whose base must be above 1, not {rope.theta:g}")
    for divisors in (rope.divisors, rope.short or rope.divisors) if rope.scaling == "divisors" else ():
        if len(divisors) != dim // 2 or not all(d > 0 for d in divisors):
            raise error(f"has {len(divisors)} rotary divisors and needs {dim // 2}, all above 0")
    return rope


def turned_layers(config: ModelConfig, turns: Iterable[object]) -> ModelConfig:
    """The config with rotary positions only in layers whose entry is true."""
    layers = zip(config.layers, turns, strict=True)
    return replace(config, layers=tuple(replace(layer, rope=layer.rope if turn else None) for layer, turn in layers))


def magnitude(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's amplitude for a context that is `factor` times the original one."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def long_amplitude(factor: float, original: int) -> float:
    """LongRoPE's amplitude for a context that is `factor` times the original one of `original` tokens."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
