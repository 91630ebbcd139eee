"""GGUF files, versions 2 and 3, little-endian: memory-mapped, every length checked, nothing copied. Written as version 3.

A model can be split over several files; each part has a header of its own, and the first has the model's metadata.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from headrace.weights.gguf_metadata import ARRAY, BOOL, SCALAR_TYPES, STRING, Cursor, quoted
from headrace.weights.kinds import KINDS
from headrace.weights.model_files import part_name, part_paths
from headrace.weights.source import LFS_BEGIN, LFS_POINTER, Chunks, TensorInfo, WeightError, write_chunks

MAX_TENSORS = 1 << 17  # real files have hundreds
MAX_NAME_BYTES = 256
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

# The file's numbers of tensor types; those that are not read are here to be refused by name.
TYPE_NAMES = dict(
    enumerate(
        "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S "
        "IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 "
        "IQ4_NL_4_8 IQ4_NL_8_8 MXFP4 NVFP4 Q1_0".split()
    )
)
VERSION = 3
TYPE_CODES = {name: code for code, name in TYPE_NAMES.items()}
UINT32, INT32, FLOAT32 = 4, 5, 6


class GGUFFile:
    """A GGUF model as a WeightSource: a file, or all files of a split model.

    path: the file, or any part of a split model; the other parts are found by their names. metadata: keys to int, float, bool,
    str, numpy arrays (numbers) and `StringArray` (strings, decoded lazily).
    Raises WeightError if a file is missing, truncated, damaged, big-endian, of another version, a part of another model, or
    holds a tensor of an unknown type.
    """

    format: Literal["gguf", "safetensors"] = "gguf"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._parts = [_Part(one) for one in part_paths(self.path)]
        _check_parts(self._parts)
        self.version, self.metadata = self._parts[0].version, self._parts[0].metadata
        self._tensors = {name: part for part in self._parts for name in part.tensors}

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """Names of all tensors in file order."""
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Shape and kind of a tensor. Raises WeightError if there is none of that name."""
        return self._part(name).tensors[name][0]

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes: uint8 [rows, row bytes], a read-only view of the mapped file."""
        part = self._part(name)
        info, start = part.tensors[name]
        return part.bytes[start : start + info.nbytes].reshape(info.rows, info.row_bytes)

    def entry(self, key: str) -> bytes:
        """A metadata entry as encoded in the file: key, type, value. Raises KeyError."""
        start, end = self._parts[0].spans[key]
        return self._parts[0].bytes[start:end].tobytes()

    def columns(self, name: str) -> None:
        """None: the columns of a row are in the order of the inputs (no act-order)."""

    def mapped(self, name: str) -> bool:
        """True: all tensors are in the mapped file."""
        return True

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory; it can still be read."""
        part = self._part(name)
        info, start = part.tensors[name]
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        part.map.madvise(mmap.MADV_DONTNEED, first, start + info.nbytes - first)

    def close(self) -> None:
        """Close the files; each is unmapped when the last view of it is dropped."""
        self.metadata = MappingProxyType({})
        self._tensors, self._parts = {}, []

    def _part(self, name: str) -> "_Part":
        if name not in self._tensors:
            raise WeightError(f"{self.path}: there is no tensor {quoted(name)}")
        return self._tensors[name]


class _Part:
    """A mapped file with its header. tensors: name -> header and position of the first byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map = _map_file(path)
        cursor = Cursor(memoryview(self.map), path)
        self.version, num_tensors, num_keys = _read_preamble(cursor)
        self.metadata: Mapping[str, Any] = MappingProxyType(cursor.metadata(num_keys))
        self.tensors = _read_tensors(cursor, num_tensors, _alignment(cursor, self.metadata))
        self.spans = cursor.spans
        self.bytes = np.frombuffer(self.map, np.uint8)

    def number(self, key: str, default: int) -> int:
        """A key about the parts of a model. Raises WeightError if it is no integer."""
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise WeightError(f"{self.path}: {key} is not an integer; the file is damaged, download it again")
        return value


def _check_parts(parts: Sequence[_Part]) -> None:
    """Raise WeightError unless the files are all parts of one model."""
    total = sum(len(part.tensors) for part in parts)
    seen: dict[str, Path] = {}
    for index, part in enumerate(parts):
        no, count = part.number("split.no", 0), part.number("split.count", 0) or 1
        if count != len(parts) and part_name(part.path.name) is None:
            raise WeightError(
                f"{part.path}: is one part of a split model of {count}, and the others are found by their names; give it back "
                f"its name, as in MODEL-{no % 100000 + 1:05d}-of-{count % 100000:05d}.gguf"
            )
        if (no, count) != (index, len(parts)):
            raise WeightError(f"{part.path}: holds part {no + 1} of {count} and has the name of another; download it again")
        if (claimed := part.number("split.tensors.count", total)) != total:
            raise WeightError(
                f"{part.path}: belongs to a model of {claimed} tensors and the parts hold {total}; the parts are of different "
                "models, download them again"
            )
        for name in part.tensors:
            if name in seen:
                raise WeightError(f"{part.path}: tensor {quoted(name)} is in {seen[name].name} too; download the parts again")
            seen[name] = part.path


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise WeightError(f"{path}: cannot be opened ({error.strerror or error}); check the path") from None
    except ValueError:
        raise WeightError(f"{path}: the file is empty; download it again") from None


def _read_preamble(cursor: Cursor) -> tuple[int, int, int]:
    """Version, number of tensors, number of metadata keys."""
    if bytes(cursor.data[:4]) != b"GGUF":
        if bytes(cursor.data[: len(LFS_BEGIN)]) == LFS_BEGIN:
            raise cursor.fail(LFS_POINTER)
        raise cursor.fail("is not a GGUF file (it does not start with GGUF)")
    cursor.pos = 4
    version = cursor.number("<I", "the header")
    if version and version & 0xFFFF == 0:
        raise cursor.fail("is a big-endian GGUF file and only little-endian ones are read; convert the model again")
    if version not in (2, 3):
        raise cursor.fail(f"is GGUF version {version} and only 2 and 3 are read; convert the model again")
    return version, cursor.number("<Q", "the header"), cursor.number("<Q", "the header")


def _alignment(cursor: Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise cursor.damaged("general.alignment is not a power of two of 8 or more")
    return alignment


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, tuple[TensorInfo, int]]:
    """Every tensor with the position of its first byte. Raises WeightError if one leaves the file or overlaps another."""
    if count > MAX_TENSORS:
        raise cursor.damaged(f"the header claims {count} tensors and {MAX_TENSORS} is the most")
    offsets: dict[str, tuple[TensorInfo, int]] = {}
    for _ in range(count):
        info, offset = _read_tensor_info(cursor)
        if info.name in offsets:
            raise cursor.damaged(f"tensor {quoted(info.name)} appears twice")
        if offset % alignment:
            raise cursor.damaged(f"tensor {quoted(info.name)} is not aligned to {alignment} bytes")
        offsets[info.name] = (info, offset)
    base = (cursor.pos + alignment - 1) // alignment * alignment
    tensors = {name: (info, base + offset) for name, (info, offset) in offsets.items()}
    end = base
    for info, start in sorted(tensors.values(), key=lambda entry: entry[1]):
        if start < end:
            raise cursor.damaged(f"tensor {quoted(info.name)} overlaps another")
        end = start + info.nbytes
        if end > len(cursor.data):
            raise cursor.damaged(f"tensor {quoted(info.name)} ends {end - len(cursor.data)} bytes past the end")
    return tensors


def _read_tensor_info(cursor: Cursor) -> tuple[TensorInfo, int]:
    """A tensor's header and its offset from the start of the data."""
    name = cursor.text("a tensor name", MAX_NAME_BYTES)
    what = f"tensor {quoted(name)}"
    num_dims = cursor.number("<I", what)
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.damaged(f"{what} has {num_dims} dimensions and 1 to {MAX_DIMS} are possible")
    sizes = [cursor.number("<Q", what) for _ in range(num_dims)]
    if 0 in sizes:
        raise cursor.damaged(f"{what} has a dimension of size 0")
    code = cursor.number("<I", what)
    kind = TYPE_NAMES.get(code, f"number {code}")
    if kind not in KINDS:
        raise cursor.fail(f"{what} has the type {kind}, which is not read; use a file with only {', '.join(KINDS)}")
    block, block_bytes = KINDS[kind]
    if sizes[0] % block:
        raise cursor.damaged(f"{what} has rows of {sizes[0]} elements and {kind} needs a multiple of {block}")
    info = TensorInfo(name, tuple(reversed(sizes)), kind, math.prod(sizes) // block * block_bytes)
    return info, cursor.number("<Q", what)


def entry(key: str, value: Any) -> bytes:
    """A metadata entry: str, bool, int (32 bits, unsigned unless negative), float (float32), list of str, or numpy array of
    numbers.

    Raises TypeError for anything else.
    """
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", STRING) + _text(value)
    if isinstance(value, bool):
        return _text(key) + struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return _text(key) + struct.pack("<II", UINT32, value) if value >= 0 else _text(key) + struct.pack("<Ii", INT32, value)
    if isinstance(value, float):
        return _text(key) + struct.pack("<If", FLOAT32, value)
    if isinstance(value, np.ndarray):
        code = next(code for code, dtype in SCALAR_TYPES.items() if dtype == value.dtype)
        return _text(key) + struct.pack("<IIQ", ARRAY, code, len(value)) + value.tobytes()
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return _text(key) + struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
    raise TypeError(f"{key}: a {type(value).__name__} is not a value of GGUF metadata")


def write_gguf(
    path: Path, entries: Sequence[bytes], tensors: Sequence[TensorInfo], chunks: Chunks, alignment: int = DEFAULT_ALIGNMENT
) -> None:
    """Write `path` atomically; an error leaves nothing.

    entries: as `entry` encodes them. chunks: bytes of the tensors in the order of `tensors`, each in any number of pieces.
    Raises OSError, and ValueError if the chunks do not fit the tensors.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(header(entries, tensors, alignment))
            write_chunks(file, tensors, chunks, alignment)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def header(entries: Sequence[bytes], tensors: Sequence[TensorInfo], alignment: int = DEFAULT_ALIGNMENT) -> bytes:
    """All bytes before the first tensor's."""
    pieces = [b"GGUF", struct.pack("<IQQ", VERSION, len(tensors), len(entries)), *entries]
    offset = 0
    for info in tensors:
        sizes = info.shape[::-1]  # innermost first
        pieces += [_text(info.name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        pieces.append(struct.pack("<IQ", TYPE_CODES[info.kind], offset))
        offset += info.nbytes + -info.nbytes % alignment
    whole = b"".join(pieces)
    return whole + bytes(-len(whole) % alignment)


def file_size(entries: Sequence[bytes], tensors: Sequence[TensorInfo], alignment: int = DEFAULT_ALIGNMENT) -> int:
    """Size of the file in bytes, before it is written."""
    return len(header(entries, tensors, alignment)) + sum(info.nbytes + -info.nbytes % alignment for info in tensors)


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw
