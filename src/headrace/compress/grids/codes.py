"""Codes of stored blocks: their place in a block, their packing, and the range of their values."""

import numpy as np

from headrace.weights.bits import join_planes, pack_halves
from headrace.weights.decode import IQ4_VALUES, MXFP4_VALUES, dequantize_numpy
from headrace.weights.kinds import KINDS

Array = np.ndarray

# First and last byte of the codes in a block (all other bytes are scales), and number of code values.
CODES = {
    "Q4_0": (2, 18, 16),
    "Q4_1": (4, 20, 16),
    "Q5_0": (2, 22, 32),
    "Q5_1": (4, 24, 32),
    "Q2_K": (16, 80, 4),
    "Q3_K": (0, 96, 8),
    "Q4_K": (16, 144, 16),
    "Q5_K": (16, 176, 32),
    "Q6_K": (0, 192, 64),
    "IQ4_NL": (2, 18, 16),
    "Q8_0": (2, 34, 255),
    "MXFP4": (1, 17, 15),
}
MXFP4_CODES = np.array([*range(15, 8, -1), *range(8)], np.uint8)  # by ascending values; -0 is left out
TABLES = {"IQ4_NL": IQ4_VALUES, "MXFP4": MXFP4_VALUES[MXFP4_CODES]}  # kinds with unevenly spaced values
ENDS = {"Q8_0": (0x81, 0x7F), "MXFP4": (0xFF, 0x77)}  # bytes of the first and last code, if not 0x00 and 0xFF


def steps(kind: str) -> Array:
    """Position of each code's value between the first (0) and the last (1): float32 [codes], ascending."""
    table = TABLES.get(kind, np.arange(CODES[kind][2], dtype=np.float32))
    positions: Array = (table - table[0]) / (table[-1] - table[0])
    return positions


def ends(rows: Array, kind: str) -> tuple[Array, Array]:
    """Values of the first and the last code at each place of rows uint8 [n, row bytes]: float32 [n, k] each.

    The first is the larger one if a scale is negative.
    """
    nbytes = KINDS[kind].nbytes
    first, last, _ = CODES[kind]
    values = []
    for code in ENDS.get(kind, (0x00, 0xFF)):
        blocks = rows.reshape(-1, nbytes).copy()
        blocks[:, first:last] = code
        values.append(dequantize_numpy(blocks.reshape(-1), kind).reshape(len(rows), -1))
    return values[0], values[1]


def with_codes(rows: Array, kind: str, q: Array) -> Array:
    """Rows with the same scales and other codes, uint8 [n, k]."""
    block, nbytes = KINDS[kind]
    first, last, _ = CODES[kind]
    blocks = rows.reshape(-1, nbytes).copy()
    blocks[:, first:last] = pack(kind, q.reshape(-1, block))
    return blocks.reshape(rows.shape)


def pack(kind: str, q: Array) -> Array:
    """Codes of blocks, uint8 [blocks, numbers], in the packing of `kind`: uint8 [blocks, bytes]."""
    if kind == "Q8_0":
        return (q - np.uint8(127)).view(np.uint8)
    if kind in ("Q5_0", "Q5_1"):
        return np.concatenate([np.packbits(q >> 4, axis=1, bitorder="little"), pack_halves(q & 15)], axis=1)
    if kind == "Q2_K":
        return _quarters(q)
    if kind == "Q3_K":
        return np.concatenate([join_planes(q.reshape(-1, 8, 32) >> 2, 1), _quarters(q & 3)], axis=1)
    if kind == "Q4_K":
        return _pairs(q)
    if kind == "Q5_K":
        return np.concatenate([join_planes(q.reshape(-1, 8, 32) >> 4, 1), _pairs(q & 15)], axis=1)
    if kind == "Q6_K":
        low = join_planes((q & 15).reshape(-1, 2, 2, 64), 4).reshape(len(q), 128)
        high = join_planes((q >> 4).reshape(-1, 2, 4, 32), 2).reshape(len(q), 64)
        return np.concatenate([low, high], axis=1)
    return pack_halves(MXFP4_CODES[q] if kind == "MXFP4" else q)


def _quarters(q: Array) -> Array:
    """2-bit codes [super-blocks, 256] -> uint8 [super-blocks, 64]."""
    return join_planes(q.reshape(-1, 2, 4, 32), 2).reshape(len(q), 64)


def _pairs(q: Array) -> Array:
    """4-bit codes [super-blocks, 256] -> uint8 [super-blocks, 128]: group 2i low, group 2i + 1 high."""
    return join_planes(q.reshape(-1, 4, 2, 32), 4).reshape(len(q), 128)
