"""GGUF files, versions 2 and 3: mapped into memory, every length checked, strings decoded when asked for.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Only little-endian files are read.
"""

import mmap
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, overload

import numpy as np
import torch

from headrace.weights.dequant import to_torch
from headrace.weights.kinds import KINDS
from headrace.weights.source import TensorInfo, WeightError

# A real file has some hundred tensors, some dozen keys and at most half a million merges.
MAX_TENSORS = 1 << 17
MAX_KEYS = 1 << 14
MAX_STRINGS = 1 << 22
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 256
MAX_DIMS = 4
MAX_SIZE = 1 << 48  # of one dimension

TYPE_NAMES = dict(
    enumerate(
        "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S "
        "IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 "
        "IQ4_NL_4_8 IQ4_NL_8_8 MXFP4 NVFP4".split()
    )
)

# Value types of the metadata; 8 is a string, 9 an array.
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
SCALAR_TYPES = {code: np.dtype(name) for code, name in SCALARS.items()}
STRING, ARRAY = 8, 9

_U64 = struct.Struct("<Q")


class StringArray(Sequence[str]):
    """An array of strings still in the file: one is decoded when it is read, `tolist` decodes them all at once."""

    def __init__(self, data: memoryview, starts: "array[int]", where: str) -> None:
        self._data = data
        self._starts = starts  # of every string, and where a further one would start
        self._where = where

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        return self._decode(self._starts[i], self._starts[i + 1] - 8)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def tolist(self) -> list[str]:
        """All strings. Raises WeightError where one is not UTF-8."""
        first = self._starts[0]
        data = bytes(self._data[first : self._starts[-1] - 8]) if len(self) else b""
        try:
            return [data[a - first : b - first - 8].decode() for a, b in pairwise(self._starts)]
        except UnicodeDecodeError:
            raise WeightError(f"{self._where} holds text that is not UTF-8; the file is damaged") from None

    def _decode(self, start: int, end: int) -> str:
        try:
            return str(self._data[start:end], "utf-8")
        except UnicodeDecodeError:
            raise WeightError(f"{self._where} holds text that is not UTF-8; the file is damaged") from None


class _Cursor:
    """Reads the header front to back; whatever would leave the file raises WeightError."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.path = path
        self.pos = 0

    def fail(self, what: str) -> WeightError:
        return WeightError(f"{self.path}: {what}")

    def need(self, nbytes: int, what: str) -> None:
        left = len(self.data) - self.pos
        if nbytes > left:
            raise self.fail(f"{what} needs {nbytes} bytes and {left} are left; the file is truncated or damaged")

    def number(self, fmt: str, what: str) -> int:
        size = struct.calcsize(fmt)
        self.need(size, what)
        (value,) = struct.unpack_from(fmt, self.data, self.pos)
        self.pos += size
        return int(value)

    def text(self, what: str, limit: int | None = None) -> str:
        size = self.number("<Q", what)
        if limit is not None and size > limit:
            raise self.fail(f"{what} is {size} bytes long and {limit} is the most; the file is damaged")
        self.need(size, what)
        raw = self.data[self.pos : self.pos + size]
        self.pos += size
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8 text; the file is damaged") from None

    def value(self, key: str) -> Any:
        code = self.number("<I", f"the type of {key}")
        if code == STRING:
            return self.text(key)
        if code == ARRAY:
            return self.array(key)
        return self.scalars(code, 1, key)[0].item()

    def array(self, key: str) -> "np.ndarray | StringArray":
        code = self.number("<I", f"the type of {key}")
        count = self.number("<Q", f"the length of {key}")
        if code == ARRAY:
            raise self.fail(f"{key} is an array of arrays, which no model needs; the file is damaged")
        return self.strings(count, key) if code == STRING else self.scalars(code, count, key)

    def scalars(self, code: int, count: int, key: str) -> np.ndarray:
        dtype = SCALAR_TYPES.get(code)
        if dtype is None:
            raise self.fail(f"{key} has the unknown value type {code}; the file is damaged or newer than this reader")
        self.need(count * dtype.itemsize, key)
        stored = np.frombuffer(self.data, np.uint8 if code == 7 else dtype, count, self.pos)
        self.pos += count * dtype.itemsize
        if code == 7:
            if count and stored.max() > 1:
                raise self.fail(f"{key} is a boolean that is neither 0 nor 1; the file is damaged")
            return stored.view(np.bool_)
        return stored

    def strings(self, count: int, key: str) -> StringArray:
        """Walk over the lengths without touching the text: this loop is what opening a file costs."""
        if count > MAX_STRINGS:
            raise self.fail(f"{key} claims {count} strings and {MAX_STRINGS} is the most; the file is damaged")
        self.need(count * 8, key)
        data, pos, unpack = self.data, self.pos, _U64.unpack_from
        starts = array("Q")
        append = starts.append
        try:
            for _ in range(count):
                append(pos + 8)
                pos += 8 + unpack(data, pos)[0]  # bounds-checked: a wild length fails at the next string
        except (struct.error, OverflowError):
            raise self.fail(f"{key} has a string that leaves the file; the file is truncated or damaged") from None
        if pos > len(data):
            raise self.fail(f"{key} has a string that leaves the file; the file is truncated or damaged")
        append(pos + 8)
        self.pos = pos
        return StringArray(data, starts, f"{self.path}: {key}")


class GGUFFile:
    """A GGUF file as a WeightSource.

    `metadata` maps keys to int, float, bool, str, numpy arrays (numbers) and `StringArray` (strings, decoded lazily).
    Raises WeightError when the file is missing, truncated, damaged, big-endian, of another version, one part of a
    split model, or holds a tensor of a type that is not read.
    """

    format: Literal["gguf"] = "gguf"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._map = _map_file(self.path)
        cursor = _Cursor(memoryview(self._map), self.path)
        self.version, num_tensors, num_keys = _read_preamble(cursor)
        self.metadata: Mapping[str, Any] = MappingProxyType(_read_metadata(cursor, num_keys))
        _check_whole(cursor, self.metadata)
        self._tensors = _read_tensors(cursor, num_tensors, _alignment(cursor, self.metadata))
        self._bytes = np.frombuffer(self._map, np.uint8)

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """Names of all tensors, in file order."""
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Shape and format of a tensor. Raises WeightError when there is none of that name."""
        return self._find(name)[0]

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes: uint8 [rows, row_bytes], a read-only view of the mapped file (no copy)."""
        info, start = self._find(name)
        return self._bytes[start : start + info.nbytes].reshape(info.rows, info.row_bytes)

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor dequantised to `dtype` (rounded to nearest even from float32), a copy of its own."""
        info = self.info(name)
        return to_torch(self.raw(name), info.kind, info.shape, dtype)

    def close(self) -> None:
        """Let the file go; views that are still held stay valid until they are dropped."""
        self._tensors, self._bytes = {}, np.empty(0, np.uint8)
        self.metadata = MappingProxyType({})

    def _find(self, name: str) -> tuple[TensorInfo, int]:
        if name not in self._tensors:
            raise WeightError(f"{self.path}: there is no tensor {name!r}")
        return self._tensors[name]


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise WeightError(f"{path}: cannot be opened ({error.strerror or error}); check the path") from None
    except ValueError:
        raise WeightError(f"{path}: the file is empty; download it again") from None


def _read_preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of metadata keys."""
    if bytes(cursor.data[:4]) != b"GGUF":
        raise cursor.fail("is not a GGUF file (it does not start with GGUF)")
    cursor.pos = 4
    version = cursor.number("<I", "the header")
    if version & 0xFFFF == 0 and version:
        raise cursor.fail("is a big-endian GGUF file; only little-endian ones are read, convert it")
    if version not in (2, 3):
        raise cursor.fail(f"is GGUF version {version}; versions 2 and 3 are read, convert it")
    num_tensors = cursor.number("<Q", "the header")
    num_keys = cursor.number("<Q", "the header")
    for count, most, what in ((num_tensors, MAX_TENSORS, "tensors"), (num_keys, MAX_KEYS, "metadata keys")):
        if count > most:
            raise cursor.fail(f"claims {count} {what} and {most} is the most; the file is damaged")
    return version, num_tensors, num_keys


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("a metadata key", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice; the file is damaged")
        metadata[key] = cursor.value(f"metadata key {key!r}")
    return metadata


def _check_whole(cursor: _Cursor, metadata: Mapping[str, Any]) -> None:
    parts = metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts > 1:
        raise cursor.fail(f"is one of {parts} parts of a split model; merge them into one file (llama-gguf-split --merge)")


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r} and must be a power of two of 8 or more; the file is damaged")
    return alignment


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, tuple[TensorInfo, int]]:
    """Every tensor and the position of its first byte in the file, checked to lie in it and apart from each other."""
    tensors: dict[str, tuple[TensorInfo, int]] = {}
    for _ in range(count):
        info, offset = _read_tensor_info(cursor)
        if info.name in tensors:
            raise cursor.fail(f"tensor {info.name!r} appears twice; the file is damaged")
        if offset % alignment:
            raise cursor.fail(f"tensor {info.name!r} is not aligned to {alignment} bytes; the file is damaged")
        tensors[info.name] = (info, offset)
    base = -(-cursor.pos // alignment) * alignment
    end = base
    for name, (info, offset) in sorted(tensors.items(), key=lambda item: item[1][1]):
        start = base + offset
        if start < end:
            raise cursor.fail(f"tensor {name!r} overlaps another; the file is damaged")
        end = start + info.nbytes
        if end > len(cursor.data):
            raise cursor.fail(f"tensor {name!r} ends {end - len(cursor.data)} bytes past the end; the file is truncated or damaged")
        tensors[name] = (info, start)
    return tensors


def _read_tensor_info(cursor: _Cursor) -> tuple[TensorInfo, int]:
    name = cursor.text("a tensor name", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    num_dims = cursor.number("<I", what)
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"{what} has {num_dims} dimensions and must have 1 to {MAX_DIMS}; the file is damaged")
    sizes = [cursor.number("<Q", what) for _ in range(num_dims)]
    if not all(1 <= size <= MAX_SIZE for size in sizes):
        raise cursor.fail(f"{what} has the sizes {sizes}; the file is damaged")
    code = cursor.number("<I", what)
    kind = TYPE_NAMES.get(code, f"number {code}")
    if kind not in KINDS:
        raise cursor.fail(f"{what} has the type {kind}, which is not read; use a file with {', '.join(KINDS)}")
    block, block_bytes = KINDS[kind]
    if sizes[0] % block:
        raise cursor.fail(f"{what} has rows of {sizes[0]} and {kind} needs multiples of {block}; the file is damaged")
    elements = 1
    for size in sizes:
        elements *= size
    offset = cursor.number("<Q", what)
    return TensorInfo(name, tuple(reversed(sizes)), kind, elements // block * block_bytes), offset
