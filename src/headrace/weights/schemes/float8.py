"""Numbers of eight bits with scales: E4M3 (no infinities) and E5M2, as torch and safetensors have them."""

import numpy as np

from headrace.weights.schemes.base import SCALES, StoredTensors


def _values(exponent: int, bias: int, least_nan: int) -> np.ndarray:
    """All 256 as float32; from `least_nan` on, without the sign, they are NaN."""
    codes = np.arange(256)
    fraction_bits = 7 - exponent
    power = codes >> fraction_bits & ((1 << exponent) - 1)
    fraction = (codes & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    size = np.where(power > 0, 1 + fraction, fraction) * 2.0 ** (np.maximum(power, 1) - bias)
    size[(codes & 127) >= least_nan] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


KINDS = ("F8_E4M3", "F8_E5M2")
VALUES = {"F8_E4M3": _values(4, 7, 0x7F), "F8_E5M2": _values(5, 15, 0x7C)}  # infinities are no weights either


def check_scale(stored: StoredTensors, matrix: str, field: str, n: int, k: int) -> None:
    """Raise WeightError unless there is one scale, one a row, or one for each block of the matrix."""
    shape = stored.info(matrix, field).shape
    counts = zip(shape, (n, k), strict=len(shape) == 2)
    blocks = len(shape) == 2 and all(-(-size // _block(size, count)) == count for count, size in counts)
    stored.shape(matrix, field, SCALES, shape if shape in ((), (1,), (n,)) or blocks else (n, 1))


def scales(stored: StoredTensors, matrix: str, field: str, n: int, k: int) -> np.ndarray:
    """float32 that multiplies [n, k]. A block has the least power of two of rows and columns with which they are so many."""
    found = stored.floats(matrix, field)
    if found.size == 1:
        return found.reshape(1, 1)
    if found.ndim == 1 or found.shape == (n, 1):
        return found.reshape(n, 1)
    rows, columns = (_block(size, count) for size, count in zip((n, k), found.shape, strict=True))
    return found.repeat(rows, 0)[:n].repeat(columns, 1)[:, :k]


def _block(size: int, count: int) -> int:
    block = 1
    while -(-size // block) > count:
        block *= 2
    return block
