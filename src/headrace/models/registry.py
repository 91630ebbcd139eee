"""The model classes by the names that families use (`Family.shape`)."""

from headrace.data.config import ModelConfig
from headrace.models.arcee import Arcee
from headrace.models.base import Model
from headrace.models.bert import Bert
from headrace.models.configs import read_config, unknown_architecture
from headrace.models.families import FAMILIES
from headrace.models.gemma3 import Gemma3
from headrace.models.gpt2 import GPT2
from headrace.models.llama import Llama
from headrace.models.marian import Marian
from headrace.models.modernbert import ModernBert
from headrace.models.olmo2 import Olmo2
from headrace.models.t5 import T5
from headrace.models.whisper import Whisper
from headrace.weights.source import WeightError

__all__ = ["MODELS", "describe", "read_config"]

MODELS: dict[str, type[Model]] = {
    "arcee": Arcee,
    "bert": Bert,
    "gemma3": Gemma3,
    "gpt2": GPT2,
    "llama": Llama,
    "marian": Marian,
    "modernbert": ModernBert,
    "olmo2": Olmo2,
    "t5": T5,
    "whisper": Whisper,
}


def describe(config: ModelConfig) -> Model:
    """The model of a config, without tensors; weights.loader fills it. Raises WeightError for an unknown architecture."""
    if config.architecture not in FAMILIES:
        raise WeightError(unknown_architecture(config.architecture))
    return MODELS[FAMILIES[config.architecture].shape](config)
