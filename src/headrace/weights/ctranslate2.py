"""Folders of CTranslate2 (faster-whisper): model.bin, read as the tensors of a Hugging Face folder.

model.bin: version (uint32), name of the specification, revision (uint32), number of variables (uint32), then each variable as
name, rank (uint8), sizes (uint32), type (uint8), number of bytes (uint32) and data; aliases of variables follow. A text is its
length (uint16, with the final zero byte) and its bytes. All numbers are little-endian.
"""

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.weights.safetensors import MAX_JSON_BYTES, SafetensorsFolder
from headrace.weights.source import TensorInfo, WeightError

FILE = "model.bin"
VERSION = 6
SPECIFICATION = "WhisperSpec"
KINDS = {0: "F32", 4: "F16", 5: "BF16"}
NAMES_OF_KINDS = {1: "int8", 2: "int16", 3: "int32"}
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
MAX_VARIABLES, MAX_RANK = 100_000, 4


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the file: its sizes, number format (as CTranslate2 numbers it), and the place of its data."""

    shape: tuple[int, ...]
    type: int
    start: int
    nbytes: int


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder holds a model of CTranslate2."""
    try:
        with (folder / FILE).open("rb") as file:
            head = file.read(64)
    except OSError:
        return False
    return len(head) > 8 and head[:4] == struct.pack("<I", VERSION) and head[6:].split(b"\0")[0].endswith(b"Spec")


class CTranslate2Folder(SafetensorsFolder):
    """A Whisper model of CTranslate2 with the names and config of a Hugging Face folder. Fused projections are views of their
    rows. Raises WeightError for other models, for integer weights, and if a header does not fit the file."""

    format: Literal["gguf", "safetensors"] = "safetensors"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = [self.path / FILE]
        with self.files[0].open("rb") as file:
            self._data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        self._places: dict[str, tuple[np.ndarray, int]] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._variables = _variables(self._data, self.files[0])
        self.config: dict[str, Any] = self._config()
        for side in ("encoder", "decoder"):
            self._add_side(side)

    def _error(self, what: str) -> WeightError:
        return WeightError(f"{self.files[0]}: {what}")

    def _config(self) -> dict[str, Any]:
        """config.json of the same model as Hugging Face stores it."""
        vocab_size, width = self._sizes("decoder/embeddings/weight", 2)
        _, bins, _ = self._sizes("encoder/conv1/weight", 3)
        positions, _ = self._sizes("encoder/position_encodings/encodings", 2)
        heads = self._variables.get("decoder/num_heads") or self._variables.get("encoder/num_heads")
        if heads is None or heads.nbytes not in (1, 2, 4):
            raise self._error("has no number of heads")
        count = int.from_bytes(self._data[heads.start : heads.start + heads.nbytes].tobytes(), "little")
        config: dict[str, Any] = {
            "model_type": "whisper",
            "vocab_size": vocab_size,
            "d_model": width,
            "num_mel_bins": bins,
            "max_source_positions": positions,
            "max_target_positions": self._sizes("decoder/position_encodings/encodings", 2)[0],
            "activation_function": "gelu",
        }
        for side in ("encoder", "decoder"):
            layers = sum(name.startswith(f"{side}/") and name.endswith("/ffn/linear_0/weight") for name in self._variables)
            config |= {
                f"{side}_layers": layers,
                f"{side}_attention_heads": count,
                f"{side}_ffn_dim": self._sizes(f"{side}/layer_0/ffn/linear_0/weight", 2)[0],
            }
        return config

    def _sizes(self, name: str, rank: int) -> tuple[int, ...]:
        if name not in self._variables:
            raise self._error(f"has no variable {name!r}; only Whisper models of CTranslate2 are read")
        shape = self._variables[name].shape
        if len(shape) != rank:
            raise self._error(f"variable {name!r} has {len(shape)} dimensions and must have {rank}")
        return shape

    def _add_side(self, side: str) -> None:
        self._add_norm(f"{side}/layer_norm", f"{side}.layer_norm")
        self._add_rows(f"{side}/position_encodings/encodings", f"{side}.embed_positions.weight")
        if side == "encoder":
            for name in ("conv1", "conv2"):
                self._add_linear(f"encoder/{name}", (f"encoder.{name}",))
        else:
            self._add_rows("decoder/embeddings/weight", "decoder.embed_tokens.weight")
        for i in range(self.config[f"{side}_layers"]):
            theirs, ours = f"{side}/layer_{i}", f"{side}.layers.{i}"
            self._add_attention(f"{theirs}/self_attention", f"{ours}.self_attn", ("qkv", ""))
            if side == "decoder":
                self._add_attention(f"{theirs}/attention", f"{ours}.encoder_attn", ("q", "kv", ""))
            self._add_norm(f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
            self._add_linear(f"{theirs}/ffn/linear_0", (f"{ours}.fc1",))
            self._add_linear(f"{theirs}/ffn/linear_1", (f"{ours}.fc2",))

    def _add_attention(self, theirs: str, ours: str, linears: tuple[str, ...]) -> None:
        self._add_norm(f"{theirs}/layer_norm", f"{ours}_layer_norm")
        for number, parts in enumerate(linears):
            names = tuple(f"{ours}.{part}_proj" for part in parts) or (f"{ours}.out_proj",)
            self._add_linear(f"{theirs}/linear_{number}", names)

    def _add_norm(self, theirs: str, ours: str) -> None:
        self._add_rows(f"{theirs}/gamma", f"{ours}.weight")
        self._add_rows(f"{theirs}/beta", f"{ours}.bias")

    def _add_linear(self, theirs: str, ours: tuple[str, ...]) -> None:
        for field in ("weight", "bias"):
            self._add_rows(f"{theirs}/{field}", *(f"{name}.{field}" for name in ours))

    def _add_rows(self, stored: str, *names: str) -> None:
        """Add a variable whose rows are those of the named tensors, in equal parts. Keys have no bias."""
        variable = self._variables.get(stored)
        if variable is None:
            raise self._error(f"has no variable {stored!r}; the file is incomplete, download it again")
        kind = KINDS.get(variable.type)
        if kind is None:
            named = NAMES_OF_KINDS.get(variable.type, f"type {variable.type}")
            raise self._error(f"has {named} weights, which are not read; take the float16 model, and add --quantize int8")
        if variable.shape[0] % len(names):
            raise self._error(f"variable {stored!r} has {variable.shape[0]} rows, which are not {len(names)} equal parts")
        shape = (variable.shape[0] // len(names), *variable.shape[1:])
        nbytes = math.prod(shape) * ITEM_BYTES[kind]
        for number, name in enumerate(names):
            if name.endswith("k_proj.bias"):
                self._check_zero(stored, variable.start + number * nbytes, nbytes)
                continue
            self._infos[name] = TensorInfo(name, shape, kind, nbytes)
            self._places[name] = self._data, variable.start + number * nbytes

    def _check_zero(self, stored: str, start: int, nbytes: int) -> None:
        if self._data[start : start + nbytes].any():
            raise self._error(f"variable {stored!r} has a bias of the keys, which Whisper does not have")

    def close(self) -> None:
        super().close()
        self._data, self._variables = np.empty(0, np.uint8), {}


def recorded_lists(folder: Path) -> dict[str, list[Any]]:
    """Lists in config.json of a CTranslate2 folder: token ids that are suppressed (`suppress_ids`, and `suppress_ids_begin` at
    the start), and `alignment_heads`, pairs of a layer and a head."""
    try:
        path = folder / "config.json"
        value = json.loads(path.read_text("utf-8")) if path.stat().st_size <= MAX_JSON_BYTES else {}
    except (OSError, ValueError):
        return {}
    keys = ("suppress_ids", "suppress_ids_begin", "alignment_heads")
    return {key: value[key] for key in keys if isinstance(value, dict) and isinstance(value.get(key), list)}


def _variables(data: np.ndarray, path: Path) -> dict[str, Variable]:
    """The variables of a file by name. Raises WeightError if the header does not fit the file."""
    cursor = _Cursor(data, path)
    if cursor.number(4) != VERSION:
        raise WeightError(f"{path}: is of another version of CTranslate2's format than {VERSION}; convert the model again")
    name, _, count = cursor.text(), cursor.number(4), cursor.number(4)
    if name != SPECIFICATION:
        raise WeightError(f"{path}: is a {name[:40]!r} model; of CTranslate2 only Whisper is read")
    if count > MAX_VARIABLES:
        raise cursor.damaged()
    variables: dict[str, Variable] = {}
    for name, variable in (cursor.variable() for _ in range(count)):
        if name in variables:
            raise WeightError(f"{path}: has variable {name!r} twice; the file is damaged")
        variables[name] = variable
    return variables


class _Cursor:
    """Reads a file from its start."""

    def __init__(self, data: np.ndarray, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0

    def damaged(self) -> WeightError:
        return WeightError(f"{self._path}: its header does not fit its {len(self._data):,} bytes; download it again")

    def take(self, count: int) -> int:
        """Advance over `count` bytes. Returns the first one's place."""
        start, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise self.damaged()
        return start

    def number(self, size: int) -> int:
        start = self.take(size)
        return int.from_bytes(self._data[start : start + size].tobytes(), "little")

    def text(self) -> str:
        length = self.number(2)
        start = self.take(length)
        return self._data[start : start + length].tobytes().rstrip(b"\0").decode("utf-8", "replace")

    def variable(self) -> tuple[str, Variable]:
        name, rank = self.text(), self.number(1)
        if rank > MAX_RANK:
            raise self.damaged()
        shape = tuple(self.number(4) for _ in range(rank))
        kind, nbytes = self.number(1), self.number(4)
        item = ITEM_BYTES.get(KINDS.get(kind, ""), 0)
        if 0 in shape or (item and math.prod(shape) * item != nbytes):
            raise self.damaged()
        return name, Variable(shape, kind, self.take(nbytes), nbytes)
