"""Interface of weight files: names, shapes and tensors, whatever the container."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol

import numpy as np

Chunks = Iterable[tuple[str, np.ndarray]]  # tensor name, bytes


class WeightError(ValueError):
    """A weight file that cannot be used. The message is one line with the fault and, if there is one, the remedy."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Header of a stored tensor. shape: in torch order ([out, in] for a linear layer). kind: stored number format
    (weights.kinds).
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    nbytes: int

    @property
    def rows(self) -> int:
        """Product of all sizes but the last; quantized blocks never cross a row."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row."""
        return self.nbytes // self.rows


LFS_BEGIN = b"version https://git-lfs.github.com/spec/"
LFS_POINTER = "is a Git LFS pointer and not the file itself; fetch it with `git lfs pull`, or pull the model"


def is_lfs_pointer(path: Path) -> bool:
    """True for the placeholder that Git LFS leaves for a large file."""
    with path.open("rb") as file:
        return file.read(len(LFS_BEGIN)) == LFS_BEGIN


HEADS_INFO, CLASSIFIER_INFO = "heads.json", "classifier.json"  # mark folders of trained parts of a model
TRAINED = {
    CLASSIFIER_INFO: "a classifier of texts (headrace classify MODEL --classifier FOLDER)",
    HEADS_INFO: "trained heads or exits of a model (headrace run MODEL --draft FOLDER, or --exits FOLDER)",
}
# Weight formats that are not read, by their files.
FOREIGN = {
    "ONNX": ("*.onnx", "onnx/*.onnx"),
    "OpenVINO": ("openvino*.xml",),
    "TensorFlow": ("*.h5",),
    "Flax": ("*.msgpack",),
}


def foreign(folder: Path) -> str:
    """Message about weights in a format that is not read; empty if there are none."""
    for name, patterns in FOREIGN.items():
        files = sorted(path for pattern in patterns for path in folder.glob(pattern))
        if files:
            return (
                f"holds {name} weights ({files[0].relative_to(folder)}), which are not read; "
                "look for the same model as safetensors or GGUF (the model it was converted from often has them)"
            )
    return ""


def adapter(folder: Path) -> str:
    """Message about an adapter without a model; empty if there is none."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return ""
    config = config if isinstance(config, dict) else {}
    return adapter_of(str(config.get("peft_type") or "LoRA"), config.get("base_model_name_or_path"))


def adapter_of(kind: str, base: object) -> str:
    """Message about an adapter."""
    model = base if isinstance(base, str) and base else "a model that it does not name"
    return (
        f"is a {'LoRA' if kind.upper() == 'LORA' else kind} adapter for {model}, which is not read by itself; merge it into "
        "that model (headrace merge), or open that model with --adapter NAME=PATH"
    )


def trained(folder: Path) -> str:
    """Message about heads, exits or a classifier in a folder; empty if there are none."""
    for name, what in TRAINED.items():
        if (folder / name).is_file():
            return f"holds {what}"
    return ""


class WeightSource(Protocol):
    """An open file (or folder) of named tensors."""

    path: Path
    format: Literal["gguf", "safetensors"]

    def names(self) -> list[str]:
        """Names of all tensors in file order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape and kind of a tensor. Raises WeightError if there is none of that name."""
        ...

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes: uint8 [rows, row bytes], a read-only view of the mapped file."""
        ...

    def columns(self, name: str) -> np.ndarray | None:
        """int32 [k] if column j of a row is input columns[j] (act-order); None: in order."""
        ...

    def mapped(self, name: str) -> bool:
        """True if the stored bytes are in a mapped file, whose pages can be dropped."""
        ...

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory; it can still be read."""
        ...

    def close(self) -> None:
        """Unmap the file; existing views stay valid until they are dropped."""
        ...


def write_chunks(file: IO[bytes], tensors: Sequence[TensorInfo], chunks: Chunks, alignment: int = 1) -> None:
    """Write the tensors' bytes in order, each padded to `alignment` bytes. Raises ValueError if the chunks do not fit them."""
    left = {info.name: info.nbytes for info in tensors}
    order = list(left)
    for name, data in chunks:
        if not order or name != order[0] or data.nbytes > left[name]:
            raise ValueError(f"bytes of tensor {name!r} do not fit the file's header")
        file.write(np.ascontiguousarray(data).data)
        left[name] -= data.nbytes
        if not left[name]:
            file.write(bytes(-file.tell() % alignment))
            order.pop(0)
    if order:
        raise ValueError(f"bytes of tensor {order[0]!r} are missing")
