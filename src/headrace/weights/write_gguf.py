"""Writer of GGUF files, version 3: metadata, tensor headers, tensor bytes.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.weights.gguf import DEFAULT_ALIGNMENT, TYPE_NAMES
from headrace.weights.gguf_metadata import ARRAY, BOOL, SCALAR_TYPES, STRING
from headrace.weights.source import Chunks, TensorInfo, write_chunks

VERSION = 3
TYPE_CODES = {name: code for code, name in TYPE_NAMES.items()}
UINT32, INT32, FLOAT32 = 4, 5, 6


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
    raise TypeError(f"{key}: a {type(value).__name__} is no value of GGUF metadata")


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
