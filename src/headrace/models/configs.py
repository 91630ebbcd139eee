"""The numbers of a model from its file. Nothing here needs the models themselves, so a file can be opened without torch."""

from collections.abc import Mapping
from typing import Any, Protocol, cast

from headrace.data.config import ModelConfig
from headrace.models.gguf_config import config_from_gguf
from headrace.models.hf_config import config_from_hf
from headrace.weights.source import WeightError, WeightSource

ARCHITECTURES = frozenset({"bert", "gemma3_text", "gpt2", "llama", "mistral", "qwen2", "qwen3"})  # those of models.registry
# general.architecture of GGUF -> ours, where the names differ.
GGUF_NAMES = {"gemma3": "gemma3_text"}
# Architectures whose GGUF files are not read -> what to do.
NOT_IN_GGUF = {
    "bert": "BERT is read from safetensors; take the folder the model is published as",
    "mistral": "GGUF files of Mistral say 'llama'; convert the model again, with convert_hf_to_gguf.py of llama.cpp",
}


class _WithConfig(Protocol):
    config: Mapping[str, Any]


class _WithMetadata(WeightSource, Protocol):
    metadata: Mapping[str, Any]


def read_config(source: WeightSource) -> ModelConfig:
    """The numbers of the model in an open file. Raises WeightError on an unknown architecture or a setting not built."""
    if source.format == "gguf":
        gguf = cast(_WithMetadata, source)
        if not gguf.names():
            raise WeightError(f"{source.path}: holds a vocabulary and no weights; take the model's own .gguf file")
        stored = str(gguf.metadata.get("general.architecture", ""))
        architecture = _known(GGUF_NAMES.get(stored, stored), stored, source)
        if architecture in NOT_IN_GGUF:
            raise WeightError(f"{source.path}: {NOT_IN_GGUF[architecture]}")
        return config_from_gguf(architecture, stored, gguf.metadata, gguf)
    config = cast(_WithConfig, source).config
    stored = str(config.get("model_type", ""))
    return config_from_hf(_known(stored, stored, source), config, str(source.path))


def _known(architecture: str, stored: str, source: WeightSource) -> str:
    if architecture not in ARCHITECTURES:
        raise WeightError(f"{source.path}: {unknown(stored)}")
    return architecture


def unknown(architecture: str) -> str:
    """What is said of one that is not known."""
    return f"unknown architecture {architecture!r}; known are {', '.join(sorted(ARCHITECTURES))}"
