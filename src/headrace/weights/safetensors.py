"""Hugging Face folders: config.json and weights as safetensors, in one file or in shards with an index; and their writer.

The `safetensors` library maps the files and checks their headers. Pickled weights are never opened.
"""

import json
import math
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from headrace import core
from headrace.weights.kinds import FLOATS
from headrace.weights.source import LFS_POINTER, Chunks, TensorInfo, WeightError, foreign, is_lfs_pointer, write_chunks
from headrace.weights.text_part import text_name, text_settings

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
MAX_JSON_BYTES = 64 << 20
NUMPY = {
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "u1",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
}


class SafetensorsFolder:
    """A Hugging Face folder as a WeightSource; `config` is its config.json, `files` its safetensors files.

    Tensors of types other than F32, F16 and BF16 are listed, and refused when read (old files store masks and position ids).
    text_only: the model also reads images, and `config` and the tensors are those of its text model.
    Raises WeightError if the folder holds no model or only pickled weights, a header does not fit its file, or index and shards
    disagree.
    """

    format: Literal["gguf", "safetensors"] = "safetensors"
    text_only = False

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise WeightError(f"{self.path}: is not a folder; check the path")
        whole = _read_json(self.path / "config.json")
        text = text_settings(whole)
        self.config: dict[str, Any] = whole if text is None else text
        self.text_only = text is not None
        names = _files(self.path)
        self.files = [self.path / name for name in names]
        self._places: dict[str, tuple[np.ndarray, int]] = {}  # tensor name -> mapped file, first byte
        self._infos: dict[str, TensorInfo] = {}
        for file, expected in zip(self.files, names.values(), strict=True):
            self._add(file, expected)
        if self.text_only:  # the folder's key and its text model's may differ
            self.config["tie_word_embeddings"] = not any(name.startswith("lm_head.") for name in self._infos)

    def __enter__(self) -> "SafetensorsFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return self._infos

    def names(self) -> list[str]:
        """Names of all tensors in file order."""
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Shape and kind of a tensor. Raises WeightError if there is none of that name."""
        if name not in self._infos:
            raise WeightError(f"{self.path}: there is no tensor {name!r}")
        return self._infos[name]

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes: uint8 [rows, row bytes], a read-only view of the mapped file."""
        info = self.info(name)
        if info.kind not in FLOATS:
            raise WeightError(f"{self.path}: tensor {name!r} has the type {info.kind}; only {', '.join(FLOATS)} are read")
        data, start = self._places[name]
        return data[start : start + info.nbytes].reshape(info.rows, info.row_bytes)

    def array(self, name: str) -> np.ndarray:
        """A tensor of any integer or float type in its shape, a view of the file; float8 as uint8, bfloat16 as uint16."""
        info = self.info(name)
        if info.kind not in NUMPY:
            raise WeightError(f"{self.path}: tensor {name!r} has the type {info.kind}, which is not read")
        data, start = self._places[name]
        return data[start : start + info.nbytes].view(NUMPY[info.kind]).reshape(info.shape)

    def columns(self, name: str) -> None:
        """None: the columns of a row are in the order of the inputs (no act-order)."""

    def mapped(self, name: str) -> bool:
        """True: all tensors are in mapped files."""
        return True

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory; it can still be read."""
        info = self.info(name)
        if core.available():
            data, start = self._places[name]
            core.module().release_pages(data[start : start + info.nbytes].reshape(1, -1))

    def close(self) -> None:
        """Close the files; each is unmapped when the last view of it is dropped."""
        self._places, self._infos = {}, {}

    def _add(self, path: Path, expected: set[str] | None) -> None:
        """Add a file. expected: the tensors that the index lists for it."""
        try:
            file = safe_open(path, framework="np")  # checks the header against the file
            infos = [_info(file, name, path) for name in file.offset_keys()]
            data, starts = _map(path)
        except (SafetensorError, OSError) as error:
            if isinstance(error, SafetensorError) and is_lfs_pointer(path):
                raise WeightError(f"{path}: {LFS_POINTER}") from None
            raise WeightError(f"{path}: cannot be read ({_one_line(error)}); download it again") from None
        names = {info.name for info in infos}
        if expected is not None and names != expected:
            name = min(names ^ expected)
            verb = "lacks" if name in expected else "holds"
            raise WeightError(f"{path}: {verb} tensor {name!r}, against {INDEX}; download the folder again")
        for info in infos:
            kept = text_name(info.name) if self.text_only else info.name
            if kept is not None:
                self._infos[kept] = replace(info, name=kept)
                self._places[kept] = data, starts[info.name]


class SafetensorsFile(SafetensorsFolder):
    """One safetensors file without a config.json, as a WeightSource. Raises WeightError for a damaged file."""

    def __init__(self, path: Path) -> None:
        self.path, self.config, self.files = path, {}, [path]
        self._places, self._infos = {}, {}
        self._add(path, None)


def _map(path: Path) -> tuple[np.ndarray, dict[str, int]]:
    """The file's bytes, read-only, and the first byte of each tensor. Layout: header length (8 bytes), header (JSON), data."""
    with path.open("rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:begin].tobytes())
    return data, {name: begin + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _info(file: Any, name: str, path: Path) -> TensorInfo:
    view = file.get_slice(name)
    shape, kind = tuple(view.get_shape()), view.get_dtype()
    if 0 in shape:
        raise WeightError(f"{path}: tensor {name!r} has a dimension of size 0; the file is damaged, download it again")
    return TensorInfo(name, shape, kind, _nbytes(shape, kind))


def _nbytes(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor; the first number in the type's name is the bits of an element."""
    digits = re.search(r"\d+", kind)
    return math.prod(shape) * (int(digits.group()) if digits else 8) // 8


def _files(folder: Path) -> dict[str, set[str] | None]:
    """The folder's safetensors files with the tensors that the index lists for each, if there is one."""
    if (folder / SINGLE).is_file():
        return {SINGLE: None}
    if (folder / INDEX).is_file():
        return _read_index(folder / INDEX)
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise WeightError(
            f"{folder}: has only pickled weights ({pickled[0]}), which can run code and are never opened; "
            "take the safetensors version of the model, or convert it (save_pretrained of transformers writes safetensors)"
        )
    raise WeightError(f"{folder}: {foreign(folder) or f'has neither {SINGLE} nor {INDEX}; download the model again'}")


def _read_index(path: Path) -> dict[str, set[str] | None]:
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise WeightError(f"{path}: has no weight_map from tensors to files; download the folder again")
    files: dict[str, set[str] | None] = {}
    for file in sorted(set(weight_map.values())):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors", file):
            raise WeightError(f"{path}: names the file {file[:80]!r}; only safetensors files in the folder itself are read")
        files[file] = {name for name, value in weight_map.items() if value == file}
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise WeightError(f"{path}: is larger than {MAX_JSON_BYTES >> 20} MiB, which no model needs; download it again")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeightError(f"{path}: cannot be opened ({error.strerror or error}); is this a Hugging Face folder?") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        why = LFS_POINTER if is_lfs_pointer(path) else "is not valid JSON; download it again"
        raise WeightError(f"{path}: {why}") from None
    if not isinstance(value, dict):
        raise WeightError(f"{path}: is not a JSON object; download it again")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def safetensors_header(tensors: Sequence[TensorInfo]) -> bytes:
    """All bytes before the first tensor's. kind of a tensor: a type of the format (F16, U8, I8 …)."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for info in tensors:
        entries[info.name] = {"dtype": info.kind, "shape": list(info.shape), "data_offsets": [start, start + info.nbytes]}
        start += info.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(path: Path, tensors: Sequence[TensorInfo], chunks: Chunks) -> None:
    """Write a file. chunks: bytes of the tensors in order, each in any number of pieces.

    Raises OSError, and ValueError if the chunks do not fit the tensors.
    """
    with path.open("wb") as file:
        file.write(safetensors_header(tensors))
        write_chunks(file, tensors, chunks)
        file.flush()
        os.fsync(file.fileno())
