"""What a GGUF file holds besides the parameters' numbers: metadata, and tensors that no parameter has."""

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from headrace.data.config import ModelConfig
from headrace.models import gguf_keys
from headrace.startup.opening import Opened
from headrace.text.gguf_keys import tokenizer_keys
from headrace.weights.gguf import GGUFFile
from headrace.weights.kinds import KINDS
from headrace.weights.source import TensorInfo
from headrace.weights.write_gguf import entry

OURS = re.compile(r"general\.(file_type|quantization_version|alignment)|quantize\..*|headrace\..*")  # keys not copied


def tensor_info(name: str, shape: tuple[int, ...], kind: str) -> TensorInfo:
    """A tensor as it will be stored."""
    block, nbytes = KINDS[kind]
    return TensorInfo(name, shape, kind, prod(shape) // block * nbytes)


def given_tensors(opened: Opened, stored: set[str], target: ModelConfig) -> dict[str, tuple[TensorInfo, np.ndarray]]:
    """Tensors that no parameter has: copied from a GGUF file, made for a folder."""
    source = opened.source
    if isinstance(source, GGUFFile):
        return {name: (source.info(name), source.raw(name)) for name in source.names() if name not in stored}
    made = gguf_keys.made_tensors(target)
    return {name: (tensor_info(name, data.shape, "F32"), data.view(np.uint8)) for name, data in made.items()}


def entries(opened: Opened, target: ModelConfig, ours: Mapping[str, Any], words: bool = True) -> list[bytes]:
    """The metadata: of a GGUF file byte for byte, but for what is said of number formats (`ours`) and, where `target` has other
    numbers than the model, of these. `words`: of a folder its vocabulary, too. Raises TokenizerError where GGUF has no form for
    that."""
    source = opened.source
    if isinstance(source, GGUFFile):
        same = target == opened.config
        made = {} if same else gguf_keys.shape_keys(source.metadata["general.architecture"], target)
        left = [key for key in source.metadata if key == "general.alignment" or not OURS.fullmatch(key)]
        copied = [source.entry(key) for key in left if key not in made]
        return copied + [entry(key, value) for key, value in (made | dict(ours)).items()]
    keys = gguf_keys.metadata(target) | {"general.name": opened.path.name}
    keys |= (tokenizer_keys(opened.path, target.vocab_size) if words else {}) | dict(ours)
    return [entry(key, value) for key, value in keys.items()]
