"""What every file of weights looks like from above: names, shapes and tensors, whatever the container."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np


class WeightError(ValueError):
    """A weight file that cannot be used; one line that says what is wrong and, where there is one, the way out."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. `shape` is in torch order ([out, in] for a linear), `kind` the stored number format."""

    name: str
    shape: tuple[int, ...]
    kind: str
    nbytes: int

    @property
    def rows(self) -> int:
        """Product of all sizes but the last: quantised blocks never cross a row."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as stored."""
        return self.nbytes // self.rows


LFS_BEGIN = b"version https://git-lfs.github.com/spec/"
LFS_POINTER = "is a Git LFS pointer and not the file itself; fetch it with `git lfs pull`, or pull the model"


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is the placeholder that Git leaves for a large file."""
    with path.open("rb") as file:
        return file.read(len(LFS_BEGIN)) == LFS_BEGIN


HEADS_INFO, CLASSIFIER_INFO = "heads.json", "classifier.json"  # what says that a folder holds something trained for a model
TRAINED = {
    CLASSIFIER_INFO: "a classifier of texts (headrace classify MODEL --classifier FOLDER)",
    HEADS_INFO: "trained heads or exits of a model (headrace run MODEL --draft FOLDER, or --exits FOLDER)",
}
# Formats of weights that are not read, by files that they leave in a folder.
FOREIGN = {
    "ONNX": ("*.onnx", "onnx/*.onnx"),
    "OpenVINO": ("openvino*.xml",),
    "TensorFlow": ("*.h5",),
    "Flax": ("*.msgpack",),
}


def foreign(folder: Path) -> str:
    """What is said of a folder with weights of a format that is not read; empty where none is known."""
    for name, patterns in FOREIGN.items():
        found = sorted(path for pattern in patterns for path in folder.glob(pattern))
        if found:
            return (
                f"holds {name} weights ({found[0].relative_to(folder)}), which are not read; "
                "look for the same model as safetensors or GGUF (the model it was converted from often has them)"
            )
    return ""


def adapter(folder: Path) -> str:
    """What is said of a folder with an adapter and no model; empty where there is none."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return ""
    config = config if isinstance(config, dict) else {}
    return adapter_of(str(config.get("peft_type") or "LoRA"), config.get("base_model_name_or_path"))


def adapter_of(kind: str, base: object) -> str:
    """What is said of an adapter."""
    model = base if isinstance(base, str) and base else "a model that it does not name"
    return (
        f"is a {'LoRA' if kind.upper() == 'LORA' else kind} adapter for {model}, which is not read by itself; merge it into "
        "that model (merge_and_unload of peft, then save_pretrained) and name the folder with the result"
    )


def trained(folder: Path) -> str:
    """What is said of a folder that holds what was trained for a model; empty where it holds nothing of the kind."""
    for name, what in TRAINED.items():
        if (folder / name).is_file():
            return f"holds {what}"
    return ""


class WeightSource(Protocol):
    """An open file (or folder) of named tensors."""

    path: Path
    format: Literal["gguf", "safetensors"]

    def names(self) -> list[str]:
        """Names of all tensors, in file order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape and format of a tensor. Raises WeightError when there is none of that name."""
        ...

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes: uint8 [rows, row_bytes], a read-only view of the mapped file (no copy)."""
        ...

    def columns(self, name: str) -> np.ndarray | None:
        """int32 [k] where a row's column j is input columns[j] (act-order); None: they stand in order."""
        ...

    def mapped(self, name: str) -> bool:
        """Whether the stored bytes lie in a mapped file, whose pages may be let go."""
        ...

    def release(self, name: str) -> None:
        """A tensor has been read for good: its pages need not stay in memory. It can still be read."""
        ...

    def close(self) -> None:
        """Unmap the file; views that are still held stay valid until they are dropped."""
        ...
