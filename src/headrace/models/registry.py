"""Which architectures there are."""

from headrace.data.config import ModelConfig
from headrace.models.base import Model
from headrace.models.bert import Bert
from headrace.models.configs import read_config, unknown
from headrace.models.gemma3 import Gemma3
from headrace.models.gpt2 import GPT2
from headrace.models.llama import Llama
from headrace.models.qwen2 import Qwen2
from headrace.models.qwen3 import Qwen3
from headrace.weights.source import WeightError

__all__ = ["MODELS", "describe", "read_config"]

MODELS: dict[str, type[Model]] = {
    "bert": Bert,
    "gemma3_text": Gemma3,
    "gpt2": GPT2,
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
}


def describe(config: ModelConfig) -> Model:
    """The model of a config, without tensors: weights.loader fills it. Raises WeightError on an unknown architecture."""
    if config.architecture not in MODELS:
        raise WeightError(unknown(config.architecture))
    return MODELS[config.architecture](config)
