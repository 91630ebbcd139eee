"""Reading of adapters (LoRA) from folders of peft and from GGUF files.

Needs no torch. Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.models.base import Model
from headrace.models.configs import name_map
from headrace.weights.decode import check_finite, read_floats
from headrace.weights.gguf import GGUFFile
from headrace.weights.lora import Adapter, LowRank
from headrace.weights.parts import WeightPart, layout
from headrace.weights.safetensors import SafetensorsFile
from headrace.weights.source import WeightError, WeightSource

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_RANK = 256
# Settings of peft that change the computation, with the values that leave it alone.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "modules_to_save": ([],),
    "lora_bias": (False,),
    "alora_invocation_tokens": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
}
PEFT_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
GGUF_NAME = re.compile(r"(?P<module>.+)\.weight\.lora_(?P<side>[ab])")


@dataclass(frozen=True, slots=True)
class _Pair:
    """A matrix of the base as an adapter names it: its two stored tensors, and the factor of their product."""

    down: str
    up: str
    scale: float


def read_adapter(name: str, path: Path, model: Model, max_rank: int = MAX_RANK) -> Adapter:
    """Read an adapter for a described model. Raises WeightError if it does not fit the model or is not supported."""
    if path.is_dir():
        adapter = _from_peft(name, path, model)
    elif path.suffix == ".gguf":
        adapter = _from_gguf(name, path, model)
    else:
        raise WeightError(f"{path}: is no adapter; give a folder with {CONFIG}, or a .gguf file")
    if (rank := max(part.rank for part in adapter.stored.values())) > max_rank:
        raise WeightError(f"{path}: has rank {rank} and --max-lora-rank is {max_rank}; raise it, {MAX_RANK} is the most")
    return adapter


def _from_peft(name: str, path: Path, model: Model) -> Adapter:
    settings = _settings(path)
    if not (path / WEIGHTS).is_file():
        pickled = f"; {PICKLED} is a pickle, save it with safe_serialization=True" if (path / PICKLED).is_file() else ""
        raise WeightError(f"{path}: has no {WEIGHTS}{pickled}")
    source = SafetensorsFile(path / WEIGHTS)
    names = name_map("safetensors", model.config.architecture)
    pairs = {}
    for module, (down, up) in _pairs(source, PEFT_NAME, "AB").items():
        rank = source.info(down).shape[0]
        stored = names.full(f"{module}.weight".removeprefix(names.prefix))
        pairs[stored] = _Pair(down, up, _scale(path, settings, module, rank))
    numbers = json.dumps([settings.get(key) for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")])
    return _adapter(name, path, model, source, pairs, "safetensors", numbers.encode())


def _from_gguf(name: str, path: Path, model: Model) -> Adapter:
    source = GGUFFile(path)
    metadata = source.metadata
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        raise WeightError(f"{path}: is no LoRA adapter (general.type is {str(metadata.get('general.type'))!r:.40})")
    alpha = metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise WeightError(f"{path}: adapter.lora.alpha must be a number above 0, not {alpha!r:.40}")
    pairs = {}
    for module, (down, up) in _pairs(source, GGUF_NAME, "ab").items():
        pairs[f"{module}.weight"] = _Pair(down, up, alpha / source.info(down).shape[0])
    return _adapter(name, path, model, source, pairs, "gguf", repr(float(alpha)).encode())


def _settings(path: Path) -> dict[str, Any]:
    """adapter_config.json, checked."""
    try:
        settings = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightError(f"{path / CONFIG}: cannot be read ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(settings, dict) or str(settings.get("peft_type", "")).upper() != "LORA":
        kind = settings.get("peft_type") if isinstance(settings, dict) else None
        raise WeightError(f"{path / CONFIG}: peft_type must be LORA, not {kind!r:.40}")
    for key, neutral in NEUTRAL.items():
        if settings.get(key) not in (None, *neutral):
            raise WeightError(f"{path / CONFIG}: asks for {key}, which is not supported; train the adapter without it")
    return settings


def _scale(path: Path, settings: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) with use_rslora, by peft's patterns for single modules."""
    r = _by_module(settings, "rank_pattern", module, settings.get("r"))
    alpha = _by_module(settings, "alpha_pattern", module, settings.get("lora_alpha", 8))
    for key, value in (("r", r), ("lora_alpha", alpha)):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise WeightError(f"{path / CONFIG}: {key} must be a number above 0, not {value!r:.40}")
    if r != rank:
        raise WeightError(f"{path}: the matrices of {module} have rank {rank}, and {CONFIG} says {r}")
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _by_module(settings: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    patterns = settings.get(key) or {}
    pattern = next((each for each in patterns if re.match(rf"(.*\.)?({each})$", module)), None)
    return default if pattern is None else patterns[pattern]


def _pairs(source: WeightSource, pattern: re.Pattern[str], sides: str) -> dict[str, tuple[str, str]]:
    """By module, the names of its two tensors."""
    modules: dict[str, dict[str, str]] = {}
    for name in source.names():
        match = pattern.fullmatch(name)
        if match is None:
            raise WeightError(
                f"{source.path}: tensor {name!r:.120} is not supported; only low-rank matrices of linear layers are"
            )
        modules.setdefault(match["module"], {})[match["side"]] = name
    for module, pair in modules.items():
        if len(pair) < 2:
            raise WeightError(f"{source.path}: {module} has one of its two matrices; the file is incomplete")
    if not modules:
        raise WeightError(f"{source.path}: holds no matrices")
    return {module: (pair[sides[0]], pair[sides[1]]) for module, pair in modules.items()}


def _adapter(
    name: str, path: Path, model: Model, source: WeightSource, pairs: Mapping[str, _Pair], container: str, numbers: bytes
) -> Adapter:
    """Assign the pairs to the parts of the model's linear layers."""
    digest = hashlib.sha256(numbers)
    parts: dict[str, list[tuple[str, str, WeightPart]]] = {}
    for layer, part_name, part in _linear_parts(model, container):
        parts.setdefault(part.source, []).append((layer, part_name, part))
    layers: dict[str, dict[str, LowRank]] = {}
    whole: dict[str, LowRank] = {}
    transposed = False
    for stored in sorted(pairs):
        pair = pairs[stored]
        if stored not in parts:
            raise WeightError(
                f"{path}: adapts {stored.removesuffix('.weight')!r:.120}, which is no linear layer of a "
                f"{model.config.architecture} model; is it the adapter of another base?"
            )
        down, up = (_read(source, tensor, digest) for tensor in (pair.down, pair.up))
        for layer, part_name, part in parts[stored]:
            _check_shapes(path, stored, part, down, up)
            transposed = transposed or part.transpose
            layers.setdefault(layer, {})[part_name] = LowRank(down, _rows(part, up).T.astype(np.float64) * pair.scale)
        whole[stored] = LowRank(down, up.T.astype(np.float64) * pair.scale)
    return Adapter(name, path, layers, whole, transposed, digest.digest())


def _linear_parts(model: Model, container: str) -> Iterator[tuple[str, str, WeightPart]]:
    """Path of each linear layer inside the model's layers, name and stored rows of its parts."""
    stored = layout(model, container)
    for path, holder in model.holders():
        parts: Any = getattr(holder, "parts", None)  # of linear layers alone
        if parts and path.startswith("layers."):
            for (part_name, _), part in zip(parts, stored[f"{path}.weight"], strict=True):
                yield path, part_name, part


def _read(source: WeightSource, name: str, digest: Any) -> np.ndarray:
    values = read_floats(source, name)
    if values.ndim != 2 or not min(values.shape) > 0:
        raise WeightError(f"{source.path}: tensor {name!r:.120} must be a matrix of rank 1 or more, not {values.shape}")
    check_finite(values, np.float32, name, source)
    digest.update(name.encode() + b"\0" + np.ascontiguousarray(values, "<f4").tobytes())
    return values


def _check_shapes(path: Path, stored: str, part: WeightPart, down: np.ndarray, up: np.ndarray) -> None:
    rank, width, rows = len(down), part.shape[1], part.stored[1 if part.transpose else 0]
    if rank > MAX_RANK:
        raise WeightError(f"{path}: {stored} has rank {rank}, and {MAX_RANK} is the most")
    if down.shape != (rank, width) or up.shape != (rows, rank):
        sizes = f"{up.shape[0]} x {down.shape[1]} of rank {down.shape[0]} and {up.shape[1]}"
        raise WeightError(
            f"{path}: adapts {stored!r:.120} as {sizes}, and the model's is {rows} x {width}; it is of another base"
        )


def _rows(part: WeightPart, up: np.ndarray) -> np.ndarray:
    """The rows [out, rank] of a part, in its order, from those of its stored matrix."""
    rows = up if part.rows is None else up[slice(*part.rows)]
    return rows if part.row_order is None else rows[list(part.row_order)]
