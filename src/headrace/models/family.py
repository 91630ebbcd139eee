"""Family: an architecture as the files of it have it, by numbers and names. No torch: a file is opened without it."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.data.config import ModelConfig
from headrace.models.reader import Reader
from headrace.weights.origins import NameMap


@dataclass(frozen=True, slots=True)
class Stored:
    """One kind of file: how its numbers are read, and what its tensors are called."""

    numbers: Callable[[Reader], ModelConfig]
    names: NameMap


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture by its Hugging Face model_type. `shape` is the model file with its order of ops (models.registry)."""

    architecture: str
    shape: str
    hf: Stored
    gguf: Stored | str  # why its GGUF files are not read, and what to do
    gguf_name: str = ""  # general.architecture, where it is another word
