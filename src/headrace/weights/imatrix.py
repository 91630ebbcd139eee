"""Importance matrices of llama.cpp's llama-imatrix: mean squares of the inputs of each matrix over a text. GGUF form and older
.dat.
"""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from headrace.weights.gguf import GGUFFile, entry, write_gguf
from headrace.weights.gguf_metadata import quoted
from headrace.weights.source import TensorInfo, WeightError

SUMS, COUNTS = ".in_sum2", ".counts"
MAX_ENTRIES, MAX_NAME, MAX_WIDTH = 1 << 16, 256, 1 << 24


def read_imatrix(path: Path) -> dict[str, np.ndarray]:
    """Importance by tensor name in GGUF files ("blk.3.ffn_down.weight"): float32 [inputs].

    Raises WeightError if the file is missing, damaged or of another kind.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            data = b"" if magic == b"GGUF" else magic + file.read()
    except OSError as error:
        raise WeightError(f"{path}: cannot be opened ({error.strerror or error}); check the path") from None
    importance = _of_gguf(path) if magic == b"GGUF" else _of_dat(path, data)
    if not importance:
        raise WeightError(f"{path}: holds no importance of any matrix; is it an importance matrix?")
    for name, values in importance.items():
        if not len(values) or not np.isfinite(values).all() or values.min() < 0:
            raise WeightError(f"{path}: the importance of {quoted(name)} is negative or no number; measure it again")
    return importance


def check_widths(path: Path | None, found: Mapping[str, np.ndarray], widths: Mapping[str, int]) -> None:
    """Raise WeightError if the importance of a matrix has another width than the matrix. widths: by name."""
    for name in sorted(found.keys() & widths.keys()):
        if (size := found[name].size) != (width := widths[name]):
            raise WeightError(f"{path}: {name} has {size} columns and the matrix {width}; use an imatrix of this model")


def write_imatrix(path: Path, measured: Mapping[str, np.ndarray], tokens: int, text: str) -> None:
    """Write mean squares of inputs, float32 [inputs] by tensor name, over `tokens` tokens of `text`, in the GGUF form. Raises
    OSError.
    """
    keys = {"general.type": "imatrix", "imatrix.datasets": [text], "imatrix.chunk_count": 1, "imatrix.chunk_size": tokens}
    tensors: dict[str, np.ndarray] = {}
    for name, values in measured.items():
        tensors[name + SUMS] = (values * np.float32(tokens)).astype("<f4").reshape(1, -1)
        tensors[name + COUNTS] = np.full((1, 1), tokens, "<f4")
    infos = [TensorInfo(name, values.shape, "F32", values.nbytes) for name, values in tensors.items()]
    write_gguf(
        path, [entry(*one) for one in keys.items()], infos, ((name, one.view(np.uint8)) for name, one in tensors.items())
    )


def _of_gguf(path: Path) -> dict[str, np.ndarray]:
    importance = {}
    with GGUFFile(path) as file:
        names = set(file.names())
        for name in sorted(name.removesuffix(SUMS) for name in names if name.endswith(SUMS)):
            if name + COUNTS not in names:
                raise WeightError(f"{path}: has no {quoted(name + COUNTS)}; the file is damaged")
            sums, counts = (_floats(file, name + ending) for ending in (SUMS, COUNTS))
            # Experts have several counts; no model with experts is built.
            if counts.size == 1 and counts[0] > 0:
                importance[name] = sums / counts[0]
    return importance


def _floats(file: GGUFFile, name: str) -> np.ndarray:
    if file.info(name).kind != "F32":
        raise WeightError(f"{file.path}: {quoted(name)} is not stored as F32; the file is damaged")
    return np.ascontiguousarray(file.raw(name)).reshape(-1).view("<f4").copy()


def _of_dat(path: Path, data: bytes) -> dict[str, np.ndarray]:
    importance, pos = {}, 0

    def number(what: str, most: int) -> int:
        nonlocal pos
        if pos + 4 > len(data):
            raise WeightError(f"{path}: ends within {what}; it is not an importance matrix, or it is damaged")
        (value,) = struct.unpack_from("<i", data, pos)
        pos += 4
        if not 0 <= value <= most:
            raise WeightError(f"{path}: has {value} as {what}; it is not an importance matrix, or it is damaged")
        return int(value)

    for _ in range(number("the number of matrices", MAX_ENTRIES)):
        size = number("the length of a name", MAX_NAME)
        name = data[pos : pos + size].decode("utf-8", "replace")
        pos += size
        calls, width = number("a number of calls", 2**31 - 1), number("a number of inputs", MAX_WIDTH)
        if not width or pos + 4 * width > len(data):
            raise WeightError(f"{path}: ends within the importance of {quoted(name)}; the file is damaged")
        importance[name] = np.frombuffer(data, "<f4", width, pos) / np.float32(max(calls, 1))
        pos += 4 * width
    return importance
