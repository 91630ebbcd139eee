"""`Family`: how an architecture is stored in files, its config keys and tensor names. Needs no torch."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.data.config import ModelConfig
from headrace.models.reader import Reader
from headrace.weights.origins import NameMap


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One file format of an architecture: reader of the config, and names of the tensors."""

    numbers: Callable[[Reader], ModelConfig]
    names: NameMap


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture, by its Hugging Face model_type.

    shape: key of the model class (models.registry). gguf: a text if GGUF files are not supported, with the reason. gguf_name:
    general.architecture in GGUF files, if different. built: settings in config.json that only some families support
    (`hf.OFF`).
    """

    architecture: str
    shape: str
    hf: FileFormat
    gguf: FileFormat | str
    gguf_name: str = ""
    built: tuple[str, ...] = ()
