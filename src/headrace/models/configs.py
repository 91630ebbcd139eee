"""The numbers and names of a model from its file. Nothing here needs the models themselves: a file is opened without torch."""

from collections.abc import Mapping
from typing import Any, Protocol, cast

from headrace.data.config import ModelConfig
from headrace.models import hf
from headrace.models.families import FAMILIES
from headrace.models.family import Family
from headrace.models.reader import Reader
from headrace.weights.origins import NameMap
from headrace.weights.source import WeightError, WeightSource, adapter_of


class _WithConfig(Protocol):
    config: Mapping[str, Any]


class _WithMetadata(Protocol):
    metadata: Mapping[str, Any]


def read_config(source: WeightSource) -> ModelConfig:
    """The numbers of the model in an open file. Raises WeightError on an unknown architecture or a setting not built."""
    if source.format == "gguf":
        metadata = cast(_WithMetadata, source).metadata
        if not source.names():
            raise WeightError(f"{source.path}: holds a vocabulary and no weights; take the model's own .gguf file")
        if metadata.get("general.type") == "adapter":
            base = metadata.get("general.base_model.0.name")
            raise WeightError(f"{source.path}: {adapter_of(str(metadata.get('adapter.type') or 'LoRA'), base)}")
        name = str(metadata.get("general.architecture", ""))
        family = _family(name, source)
        if isinstance(family.gguf, str):
            raise WeightError(f"{source.path}: {family.gguf}")
        return family.gguf.numbers(Reader(family.architecture, metadata, source, "metadata", f"{name}."))
    settings = cast(_WithConfig, source).config
    family = _family(str(settings.get("model_type", "")), source)
    read = Reader(family.architecture, settings, source, "config.json")
    hf.refuse_not_built(read)
    return family.hf.numbers(read)


def name_map(container: str, architecture: str) -> NameMap:
    """What the tensors of an architecture are called in a kind of file (gguf | safetensors) that it is read from."""
    family = FAMILIES[architecture]
    stored = family.gguf if container == "gguf" else family.hf
    if isinstance(stored, str):
        raise WeightError(stored)
    return stored.names


def _family(name: str, source: WeightSource) -> Family:
    """The family whose word for its architecture this is."""
    names = {family.gguf_name: family for family in FAMILIES.values() if source.format == "gguf"} | FAMILIES
    if name not in names or not name:
        raise WeightError(f"{source.path}: {unknown(name)}")
    return names[name]


def unknown(architecture: str) -> str:
    """What is said of one that is not known."""
    return f"unknown architecture {architecture!r}; known are {', '.join(sorted(FAMILIES))}"
