"""Which architectures there are, and how a file of weights says which one it holds."""

from collections.abc import Mapping
from typing import Any, Protocol, cast

from headrace.config import ModelConfig
from headrace.models.base import Model
from headrace.models.bert import Bert
from headrace.models.gemma3 import Gemma3
from headrace.models.gguf_config import config_from_gguf
from headrace.models.gpt2 import GPT2
from headrace.models.hf_config import config_from_hf
from headrace.models.llama import Llama
from headrace.models.qwen2 import Qwen2
from headrace.models.qwen3 import Qwen3
from headrace.weights.source import WeightError, WeightSource

MODELS: dict[str, type[Model]] = {
    "bert": Bert,
    "gemma3_text": Gemma3,
    "gpt2": GPT2,
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}
# general.architecture of GGUF -> ours, where the names differ. GGUF files of Mistral say "llama".
GGUF_NAMES = {"gemma3": "gemma3_text"}


class _WithConfig(Protocol):
    config: Mapping[str, Any]


class _WithMetadata(WeightSource, Protocol):
    metadata: Mapping[str, Any]


def read_config(source: WeightSource) -> ModelConfig:
    """The numbers of the model in an open file. Raises WeightError on an unknown architecture or a setting not built."""
    if source.format == "gguf":
        gguf = cast(_WithMetadata, source)
        stored = str(gguf.metadata.get("general.architecture", ""))
        architecture = _known(GGUF_NAMES.get(stored, stored), stored, source)
        if architecture == "bert":
            raise WeightError(f"{source.path}: BERT is read from safetensors; take the folder the model is published as")
        return config_from_gguf(architecture, stored, gguf.metadata, gguf)
    config = cast(_WithConfig, source).config
    stored = str(config.get("model_type", ""))
    return config_from_hf(_known(stored, stored, source), config, str(source.path))


def describe(config: ModelConfig) -> Model:
    """The model of a config, without tensors: weights.loader fills it. Raises WeightError on an unknown architecture."""
    if config.architecture not in MODELS:
        raise WeightError(_unknown(config.architecture))
    return MODELS[config.architecture](config)


def _known(architecture: str, stored: str, source: WeightSource) -> str:
    if architecture not in MODELS:
        raise WeightError(f"{source.path}: {_unknown(stored)}")
    return architecture


def _unknown(architecture: str) -> str:
    return f"unknown architecture {architecture!r}; known are {', '.join(sorted(MODELS))}"
