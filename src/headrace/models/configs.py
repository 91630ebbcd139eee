"""Config and tensor names of a model from its file. Needs no model files and no torch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from headrace.data.config import ModelConfig
from headrace.models import hf
from headrace.models.families import FAMILIES
from headrace.models.family import Family
from headrace.models.not_built import missing
from headrace.models.reader import Reader
from headrace.models.rope_scaling import with_scaling
from headrace.weights.origins import NameMap
from headrace.weights.source import WeightError, WeightSource, adapter_of

# Keys with the number of experts, by family.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Diffusion models.
WHOLE_TEXT = ("llada", "llada-moe", "llada_moe", "dream")


def read_config(source: WeightSource, rope: str | None = None) -> ModelConfig:
    """The config of the model in an open file. rope: a scaling as in `with_scaling`, for a longer context.

    Raises WeightError for an unknown architecture or an unsupported setting, and ValueError for a scaling that cannot be used.
    """
    config = _read_config(source)
    return config if rope is None else with_scaling(config, rope)


def _read_config(source: WeightSource) -> ModelConfig:
    if source.format == "gguf":
        metadata: Mapping[str, Any] = cast(Any, source).metadata
        if not source.names():
            raise WeightError(f"{source.path}: holds a vocabulary and no weights; take the model's own .gguf file")
        if metadata.get("general.type") == "adapter":
            base = metadata.get("general.base_model.0.name")
            raise WeightError(f"{source.path}: {adapter_of(str(metadata.get('adapter.type') or 'LoRA'), base)}")
        name = str(metadata.get("general.architecture", ""))
        _refuse_experts(metadata.get(f"{name}.expert_count"), source)
        family = _family(name, source)
        if isinstance(family.gguf, str):
            raise WeightError(f"{source.path}: {family.gguf}")
        read = Reader(family.architecture, metadata, source, "metadata", f"{name}.")
        return _masked(family.gguf.numbers(read), replace(read, prefix="tokenizer.ggml."))
    settings: Mapping[str, Any] = cast(Any, source).config
    _refuse_experts(next((settings[key] for key in EXPERTS if key in settings), None), source)
    family = _family(str(settings.get("model_type", "")), source)
    read = Reader(family.architecture, settings, source, "config.json")
    hf.refuse_not_built(read, family.built)
    return _masked(family.hf.numbers(read), read)


def _masked(config: ModelConfig, read: Reader) -> ModelConfig:
    """The config with the file's mask token. Raises WeightError if it is outside the vocabulary."""
    mask = read.get("mask_token_id")
    if mask is None or config.encoder:
        return config
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < config.vocab_size:
        raise read.error(f"names mask_token_id {mask!r}, and the vocabulary's ids are 0 to {config.vocab_size - 1}")
    return replace(config, mask_id=mask)


def _refuse_experts(count: object, source: WeightSource) -> None:
    """Raise WeightError for a model with experts, also of an unknown architecture."""
    if isinstance(count, int) and count > 1:
        raise WeightError(
            f"{source.path}: has layers of {count} experts, which are not built; take a model without experts, of these "
            f"architectures: {', '.join(sorted(FAMILIES))}"
        )


def name_map(container: str, architecture: str) -> NameMap:
    """Names of an architecture's tensors in a GGUF file or a safetensors folder."""
    family = FAMILIES[architecture]
    stored = family.gguf if container == "gguf" else family.hf
    if isinstance(stored, str):
        raise WeightError(stored)
    return stored.names


def _family(name: str, source: WeightSource) -> Family:
    """The family with this architecture name in files of this format. Raises WeightError for an unknown name."""
    names = {family.gguf_name: family for family in FAMILIES.values() if source.format == "gguf"} | FAMILIES
    if name not in names or not name:
        raise WeightError(f"{source.path}: {unknown_architecture(name)}")
    return names[name]


def unknown_architecture(architecture: str) -> str:
    """Error text for an architecture that is not supported."""
    if architecture.lower() in WHOLE_TEXT:
        return (
            f"{architecture} reads its whole text in both directions, so it has no cache to keep and every pass would feed the "
            "whole text; take a model that fills in blocks (docs/en/understand/decoding.md), or one that writes token by token"
        )
    known = ", ".join(sorted(FAMILIES))
    if (lack := missing(architecture)) is not None:
        return f"{architecture} is not supported, Headrace lacks {lack}; supported are {known}"
    return f"unknown architecture {architecture!r}; known are {known}"
