"""Description of a weight file as plain data, also for architectures that Headrace does not run."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.weights.ggml import GGMLFile
from headrace.weights.gguf import GGUFFile
from headrace.weights.kinds import FLOATS
from headrace.weights.kv_settings import FILE, FORMAT_KEY
from headrace.weights.model_files import is_ggml
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes.folder import QuantizedFolder, open_folder
from headrace.weights.source import TensorInfo, WeightSource

LINE = 16  # the core pads head dimensions to multiples of it
COMPRESSED, COMPRESS_KEY = FILE, "headrace.compress"  # where `headrace compress` records its methods


def describe(path: Path) -> dict[str, Any]:
    """Plain data about a `.gguf` file, a ggml file or a folder with safetensors; None for values that the file does not have.

    Keys: path, format, quantised (scheme of quantization), activations (rounding that it asks for), core (how the native core
    holds its matrices then), compress (methods of `headrace compress`), kv (K/V format that it asks for), name, architecture,
    licence, tensors (name, type that it is read as, shape, bytes in the file), types (tensors of each), parameters, bits (a
    parameter), bytes, layers, hidden_size, heads, kv_heads, head_dim, context_length, sliding_window, kv_bytes_per_token (by
    number format, over all layers with K and V, windows not counted), tokenizer, vocab_size, chat_template. Raises WeightError.
    """
    if path.is_dir():
        folder = open_folder(path)
        record = _json(path / COMPRESSED)
        kv = record["kv"].get("format") if isinstance(record.get("kv"), dict) else None
        return {**_tensors(folder), "compress": _text(record.get("compress")), "kv": _text(kv), **_from_config(folder)}
    if is_ggml(path):
        ggml = GGMLFile(path)
        return {**_tensors(ggml), "format": "ggml", "compress": None, "kv": None, **_from_config(ggml)}
    file = GGUFFile(path)
    ours = {"compress": _text(file.metadata.get(COMPRESS_KEY)), "kv": _text(file.metadata.get(FORMAT_KEY))}
    return {**_tensors(file), **ours, **_from_metadata(file.metadata)}


def _tensors(source: WeightSource) -> dict[str, Any]:
    infos = [source.info(name) for name in source.names()]
    quantised = source.scheme.summary if isinstance(source, QuantizedFolder) else None
    if isinstance(source, QuantizedFolder):
        infos = [replace(one, nbytes=source.stored_bytes(one.name)) for one in infos]
    return {
        "path": str(source.path),
        "format": source.format,
        "quantised": quantised,
        "core": _in_core(infos) if quantised else None,
        "activations": source.activations if isinstance(source, QuantizedFolder) and source.activations != "auto" else None,
        "tensors": [{"name": one.name, "type": one.kind, "shape": list(one.shape), "bytes": one.nbytes} for one in infos],
        "types": dict(Counter(one.kind for one in infos).most_common()),
        "parameters": (parameters := sum(int(np.prod(one.shape, dtype=np.int64)) for one in infos)),
        "bits": 8 * sum(one.nbytes for one in infos) / max(parameters, 1),
        "bytes": sum(one.nbytes for one in infos),
    }


def _in_core(infos: Sequence[TensorInfo]) -> str:
    """Which matrices the core keeps packed, and which in bfloat16."""
    kinds = Counter(one.kind for one in infos if len(one.shape) == 2)
    packed = [f"{kinds[kind]} matrices packed as {kind}" for kind in kinds if kind not in FLOATS]
    floats = sum(count for kind, count in kinds.items() if kind in FLOATS)
    return ", ".join(packed + ([f"{floats} in bfloat16"] if floats else []))


def _from_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    architecture = _text(metadata.get("general.architecture"))

    def get(key: str) -> Any:
        return metadata.get(f"{architecture}.{key}")

    layers, hidden = _count(get("block_count")), _count(get("embedding_length"))
    heads = _per_layer(get("attention.head_count"), layers)
    kv_heads = _per_layer(get("attention.head_count_kv"), layers) or heads
    head_dim = hidden // max(heads) if hidden and heads and max(heads) else None
    key_dim = _count(get("attention.key_length")) or head_dim
    value_dim = _count(get("attention.value_length")) or head_dim
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokenizer = [_text(metadata.get("tokenizer.ggml.model")), _text(metadata.get("tokenizer.ggml.pre"))]
    return {
        "name": _text(metadata.get("general.name")),
        "architecture": architecture,
        "licence": _text(metadata.get("general.license")),
        "layers": layers,
        "hidden_size": hidden,
        "heads": max(heads, default=None),
        "kv_heads": max(kv_heads, default=None),
        "head_dim": key_dim,
        "context_length": _count(get("context_length")),
        "sliding_window": _count(get("attention.sliding_window")),
        "kv_bytes_per_token": kv_bytes(sum(kv_heads), (key_dim or 0) + (value_dim or 0)),
        "tokenizer": " ".join(part for part in tokenizer if part) or None,
        "vocab_size": len(tokens) if tokens is not None else _count(get("vocab_size")),
        "chat_template": _text(metadata.get("tokenizer.chat_template")),
    }


def _from_config(folder: SafetensorsFolder | QuantizedFolder) -> dict[str, Any]:
    whole = folder.config
    config = whole["text_config"] if isinstance(whole.get("text_config"), dict) else whole

    def get(*keys: str) -> int | None:
        return next((value for key in keys if (value := _count(config.get(key))) is not None), None)

    layers, hidden, heads = (
        get("num_hidden_layers", "n_layer"),
        get("hidden_size", "n_embd"),
        get("num_attention_heads", "n_head"),
    )
    kv_heads = get("num_key_value_heads") or heads
    head_dim = get("head_dim") or (hidden // heads if hidden and heads else None)
    return {
        "name": _text(whole.get("_name_or_path")) or folder.path.name,
        "architecture": _text(config.get("model_type")),
        "licence": None,
        "layers": layers,
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "context_length": get("max_position_embeddings", "n_positions"),
        "sliding_window": get("sliding_window") if config.get("use_sliding_window", True) else None,
        # Of each `kv_share` layers (Headrace's own key) only the first has K and V.
        "kv_bytes_per_token": kv_bytes(-(-(layers or 0) // (get("kv_share") or 1)) * (kv_heads or 0), 2 * (head_dim or 0)),
        "tokenizer": _text(_json(folder.path / "tokenizer.json").get("model", {}).get("type")),
        "vocab_size": get("vocab_size"),
        "chat_template": _folder_template(folder.path),
    }


def _folder_template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8", errors="replace")
    value = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(value, list):  # several, by name
        value = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}.get("default")
    return _text(value)


def kv_bytes(heads: int, dims: int) -> dict[str, int] | None:
    """Bytes of K and V of one token, by format. heads: KV heads of all layers; dims: numbers of K and V of one head.

    Integer formats as the native core stores them, with padding and scales.
    """
    if not (heads and dims):
        return None
    padded = 2 * (-(-dims // 2 // LINE) * LINE)
    ours = {"int8": heads * (padded + 8), "int4": heads * (padded // 2 + 12)}  # two scales in float32, six in bfloat16
    return {"float16": 2 * heads * dims, "float32": 4 * heads * dims, **ours}


def _per_layer(value: Any, layers: int | None) -> list[int]:
    """A value of every layer, from one number or an array."""
    if isinstance(value, np.ndarray):
        return [int(one) for one in value]
    number = _count(value)
    return [number] * (layers or 0) if number is not None else []


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
