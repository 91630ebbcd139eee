"""The files of a model. A split GGUF model has `NAME-00001-of-00003.gguf` and so on, as llama-gguf-split writes them."""

import re
from pathlib import Path
from typing import NamedTuple

from headrace.weights.source import WeightError

PART = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
WEIGHTS, CTRANSLATE2 = (".gguf", ".safetensors"), "model.bin"
MAX_PARTS = 1000  # real models have tens
GGML_MAGIC = (0x67676D6C).to_bytes(4, "little")  # of whisper.cpp's files


class PartName(NamedTuple):
    """A file name taken apart. number: from 1 to total."""

    model: str
    number: int
    total: int


def is_ggml(path: Path) -> bool:
    """Whether a file begins as ggml files of whisper.cpp do."""
    try:
        with path.open("rb") as file:
            return file.read(len(GGML_MAGIC)) == GGML_MAGIC
    except OSError:
        return False


def part_name(name: str) -> PartName | None:
    """Take a file name apart; None if it is not that of a part."""
    match = PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]) <= MAX_PARTS:
        return None
    return PartName(match["model"], int(match["number"]), int(match["count"]))


def part_names(name: PartName) -> list[str]:
    """The file names of all parts, in order."""
    return [f"{name.model}-{number:05d}-of-{name.total:05d}.gguf" for number in range(1, name.total + 1)]


def first_name(name: str) -> str:
    """The file name of the first part of a split model; of any other file, its own."""
    part = part_name(name)
    return name if part is None else part_names(part)[0]


def part_paths(path: Path) -> list[Path]:
    """The files of a model of which `path` is any part, in order; `path` alone if the model is one file.

    Raises WeightError if a part is missing.
    """
    name = part_name(path.name)
    if name is None:
        return [path]
    paths = [path.with_name(part) for part in part_names(name)]
    for number, part in enumerate(paths, 1):
        if part != path and not part.exists():
            raise WeightError(f"{path}: part {number} of {name.total} is missing; put {part.name} into the same folder")
    return paths


def model_files(model: Path) -> list[Path]:
    """The files of a model: those of a GGUF model in order, or all in its folder by name. Raises OSError, WeightError."""
    return part_paths(model) if model.is_file() else sorted(model.iterdir())


def weight_files(model: Path) -> list[Path]:
    """The files with a model's weights: of a GGUF or ggml model all. Raises OSError, WeightError."""
    return [file for file in model_files(model) if model.is_file() or file.suffix in WEIGHTS or file.name == CTRANSLATE2]
