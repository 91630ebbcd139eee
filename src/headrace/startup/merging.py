"""Merging of an adapter into a model's folder: W + scale · B A in float32, rounded once to the stored type. Needs no torch."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.startup.opening import open_files
from headrace.startup.read_adapter import read_adapter
from headrace.weights.bits import bfloat16_bits
from headrace.weights.decode import read_floats
from headrace.weights.gguf import GGUFFile
from headrace.weights.lora import Adapter
from headrace.weights.safetensors import SINGLE, SafetensorsFolder, write_safetensors
from headrace.weights.source import WeightError

# Files of a folder that are not copied: weights, and the list of their shards.
WEIGHTS = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", ".*")


def merge(model: str | Path, adapter: Path, out: Path) -> int:
    """Write a folder with the adapter added to a model's weights. Returns the number of changed tensors.

    Raises WeightError for a model that is no folder of float weights, or an adapter that is not of peft or not of this model.
    """
    opened = open_files(model)
    source = opened.source
    if not isinstance(source, SafetensorsFolder):
        raise WeightError(
            f"{source.path}: its weights are quantised; merge into the original model, or of a GGUF file write -o FILE.gguf"
        )
    if not adapter.is_dir():
        raise WeightError(f"{adapter}: only a folder of peft is merged; serve the .gguf file with --adapter")
    merged = read_adapter("merged", adapter, describe(opened.config))
    names = {_own_name(name, source.names()): name for name in merged.stored}
    out.mkdir(parents=True, exist_ok=True)
    infos = [source.info(name) for name in source.names()]
    write_safetensors(out / SINGLE, infos, _tensors(source, merged, names))
    for path in sorted(source.path.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in WEIGHTS):
            shutil.copyfile(path, out / path.name)
    return len(names)


def open_to_merge(model: str | Path, adapter: Path) -> tuple[GGUFFile, Model, Adapter]:
    """A GGUF file, its described model, and an adapter of it. Raises WeightError."""
    opened = open_files(model)
    if not isinstance(opened.source, GGUFFile):
        raise WeightError(f"{opened.path}: is no GGUF file; name a folder for the output")
    described: Model = describe(opened.config)
    return opened.source, described, read_adapter("merged", adapter, described)


def _own_name(name: str, names: list[str]) -> str:
    """The name of a tensor in a file whose names may lack their first part ("model.")."""
    return name if name in names else name.partition(".")[2]


def _tensors(source: SafetensorsFolder, adapter: Adapter, names: dict[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    for name in source.names():
        if name not in names:
            yield name, np.ascontiguousarray(source.raw(name)).reshape(-1)
            continue
        part, values = adapter.stored[names[name]], read_floats(source, name)
        delta = (part.up.T @ part.down.astype(np.float64)).astype(np.float32)
        values += delta.T if adapter.transposed else delta
        kind = source.info(name).kind
        stored = values if kind == "F32" else values.astype(np.float16) if kind == "F16" else bfloat16_bits(values)
        if not np.isfinite(values if kind != "F16" else stored).all():
            raise WeightError(f"{source.path}: {name!r} and the adapter together are not finite in {kind}")
        yield name, np.ascontiguousarray(stored).view(np.uint8).reshape(-1)
