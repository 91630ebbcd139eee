"""K/V settings stored in a model file: a number format, and key means that are subtracted from every stored key."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.config import ModelConfig
from headrace.weights.gguf import GGUFFile
from headrace.weights.source import WeightError, WeightSource

FORMATS = ("int8", "int4")
FILE, FORMAT_KEY, CENTRE_KEY = "headrace.json", "headrace.kv.format", "headrace.kv.centre"


@dataclass(frozen=True, slots=True)
class KVSettings:
    """format: one of FORMATS. centre: mean of K after rotary embedding, float32 [layers, KV heads * head size].

    Softmax does not change if a constant is subtracted from all keys, and the difference loses less when rounded.
    """

    format: str
    centre: np.ndarray

    def by_layer(self, numbers: Sequence[int]) -> dict[int, np.ndarray]:
        """`centre` by layer. numbers: of the layers with K/V of their own, ascending."""
        return dict(zip(numbers, self.centre, strict=True))

    def metadata(self) -> dict[str, Any]:
        """Metadata of a GGUF file."""
        return {FORMAT_KEY: self.format, CENTRE_KEY: self.centre.ravel()}

    def record(self) -> dict[str, Any]:
        """JSON of a folder."""
        return {"format": self.format, "centre": self.centre.tolist()}


def kv_settings(source: WeightSource, config: ModelConfig) -> KVSettings | None:
    """Settings of a model's file, or None. Raises WeightError if invalid, and for layers whose K/V differ in width."""
    if isinstance(source, GGUFFile):
        stored = {"format": source.metadata.get(FORMAT_KEY), "centre": source.metadata.get(CENTRE_KEY)}
    else:
        stored = _of_folder(source.path)
    if stored.get("format") is None:
        return None
    layers = config.kv_layers
    centre: np.ndarray
    try:
        (width,) = {config.layers[number].kv_size for number in layers}
        centre = np.asarray(stored.get("centre"), np.float32).reshape(len(layers), width)
    except (TypeError, ValueError):
        centre = np.full(1, np.nan, np.float32)
    if stored["format"] not in FORMATS or not np.isfinite(centre).all():
        raise WeightError(
            f"{source.path}: asks for K and V as this model cannot have them ({str(stored['format'])[:24]}); compress it "
            "again, with headrace compress --kv int4"
        )
    return KVSettings(stored["format"], centre)


def _of_folder(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads((path / FILE).read_text("utf-8")).get("kv")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise WeightError(f"{path / FILE} cannot be read ({error}); repair or remove it") from None
    return settings if isinstance(settings, dict) else {}
