"""What a model's file asks for its K and V: a number format, and a constant that every K is stored less."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.weights.gguf import GGUFFile
from headrace.weights.source import WeightError, WeightSource

FORMATS = ("int8", "int4")  # that a file may ask for
FILE, FORMAT_KEY, CENTRE_KEY = "headrace.json", "headrace.kv.format", "headrace.kv.centre"


@dataclass(frozen=True, slots=True)
class KVSettings:
    """`format`: of FORMATS. `centre`: float32 [layers, KV heads * head size], about the mean of K once it is turned. Softmax
    does not see a constant taken off all keys, and what is left loses less when it is rounded."""

    format: str
    centre: np.ndarray

    def metadata(self) -> dict[str, Any]:
        """For a GGUF file."""
        return {FORMAT_KEY: self.format, CENTRE_KEY: self.centre.ravel()}

    def record(self) -> dict[str, Any]:
        """For a folder's JSON."""
        return {"format": self.format, "centre": self.centre.tolist()}


def kv_settings(source: WeightSource, shape: tuple[int, int, int]) -> KVSettings | None:
    """What the file says, or None; `shape`: layers, KV heads and head size of its model. Raises WeightError where it says
    what cannot be."""
    if isinstance(source, GGUFFile):
        found = {"format": source.metadata.get(FORMAT_KEY), "centre": source.metadata.get(CENTRE_KEY)}
    else:
        found = _of_folder(source.path)
    if found.get("format") is None:
        return None
    layers, heads, head_dim = shape
    centre: np.ndarray
    try:
        centre = np.asarray(found.get("centre"), np.float32).reshape(layers, heads * head_dim)
    except (TypeError, ValueError):
        centre = np.full(1, np.nan, np.float32)
    if found["format"] not in FORMATS or not np.isfinite(centre).all():
        raise WeightError(
            f"{source.path}: asks for K and V as this model cannot have them ({str(found['format'])[:24]}); compress it again, "
            "with headrace compress --kv int4"
        )
    return KVSettings(found["format"], centre)


def _of_folder(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads((path / FILE).read_text("utf-8")).get("kv")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise WeightError(f"{path / FILE} cannot be read ({error}); repair or remove it") from None
    return settings if isinstance(settings, dict) else {}
