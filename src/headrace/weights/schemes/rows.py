"""Quantized integers and their scales as rows of a kind. Exact for float16 scales: integer minus zero point is an integer.

q - z of up to 4 bits, any z:   G4_128 where groups are of a multiple of 128 inputs, w = d * (q - z)
the same in other groups:   Q4_0 where z = 8, w = d * (q - 8), else G4_32
q - z of 5 bits, z = 16:    Q5_0, w = d * (q - 16)
q - z of up to 7 bits, any z, and of 8 bits, z = 128:   Q8_0, w = d * (q - z)
the same with one scale for each row:   C8 (compressed-tensors), w = d * q
q - z of 8 bits, any z:     G8_128 where groups are of a multiple of 128 inputs, else G8_32, w = d * (q - z)
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from headrace import core
from headrace.weights.bits import blocks_with_scales, pack_halves, unpack_fields, unpack_halves
from headrace.weights.kinds import KINDS

BLOCK = 32
TURN = 256  # rows decoded at a time by one thread
RANGES = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}  # integers that a kind holds
POINTS = {"G4_128": 128, "G4_32": 32}  # 4-bit kinds with zero points, and their group size
WIDE = {"G8_128": 128, "G8_32": 32}  # 8-bit kinds with zero points, and their group size
MOST_POINT = 16
MOST_ROW_COLUMNS = 65_536  # of C8, whose rows are summed in int32


def kind_of(bits: int, low: int, high: int, group: int) -> str:
    """The narrowest kind for codes of `bits` bits that are in [low, high] after their zero point is subtracted.

    group: inputs that share a scale and zero point; 0: unknown.
    """
    if bits <= 4 and group and group % POINTS["G4_128"] == 0:
        return "G4_128"
    narrowest = next((kind for kind, (least, most) in RANGES.items() if least <= low and high <= most), "")
    if bits <= 4 and narrowest != "Q4_0":
        return "G4_32"
    return narrowest or ("G8_128" if group and group % WIDE["G8_128"] == 0 else "G8_32")


def grouped_rows(kind: str, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of a kind that `kind_of` returns, uint8 [n, row bytes].

    codes: uint8 [n, k]. zeros (zero points): uint8 [n, k / 32]. scales: float16 [n, k / 32].
    """
    n, blocks = scales.shape
    each = codes.reshape(n, blocks, BLOCK)
    if kind in WIDE:
        return _wide_rows(kind, codes, zeros, scales)
    return integer_rows(kind, (each - zeros[:, :, None]).view(np.int8).reshape(n, -1), scales)


def integer_rows(kind: str, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of a kind of RANGES or POINTS, or of C8, uint8 [n, row bytes]. values: int8 [n, k]. scales: float16 [n, k / 32]."""
    if kind in POINTS:
        return _point_rows(kind, values, scales)
    n, blocks = scales.shape
    rows = blocks_with_scales(scales, KINDS[kind].nbytes)
    offset = values.reshape(n, blocks, BLOCK).view(np.uint8)
    if kind in ("Q8_0", "C8"):
        rows[:, :, 2:] = offset
        return rows.reshape(n, -1)
    offset = offset + np.uint8(-RANGES[kind][0])
    if kind == "Q5_0":
        rows[:, :, 2:6] = np.packbits(offset >> 4, axis=2, bitorder="little")
    rows[:, :, -16:] = pack_halves(offset & 15)
    return rows.reshape(n, -1)


def _point_rows(kind: str, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of POINTS. A zero point is the least with which no code of its group is negative.

    Raises ValueError if the integers of a group are more than 15 apart.
    """
    n, each = len(values), POINTS[kind] // BLOCK
    groups = values.reshape(n, -1, POINTS[kind])
    zeros = np.maximum(-groups.min(2).astype(np.int16), 0)
    codes = groups.astype(np.int16) + zeros[:, :, None]
    if codes.size and (codes.max() > 15 or zeros.max() > MOST_POINT):
        raise ValueError("a group has integers that do not fit into 4 bits with a zero point")
    rows = blocks_with_scales(scales[:, ::each], KINDS[kind].nbytes)
    rows[:, :, 2] = zeros
    nibbles = pack_halves(codes.astype(np.uint8).reshape(n, -1, BLOCK))
    rows[:, :, 3:] = nibbles.reshape(*zeros.shape, -1)
    return rows.reshape(n, -1)


def _wide_rows(kind: str, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    n, each = len(codes), WIDE[kind] // BLOCK
    rows = blocks_with_scales(scales[:, ::each], KINDS[kind].nbytes)
    rows[:, :, 2] = zeros[:, ::each]
    rows[:, :, 3:] = codes.reshape(n, -1, WIDE[kind])
    return rows.reshape(n, -1)


def row_integers(kind: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `integer_rows`: int8 [n, k] and float16 [n, k / 32]."""
    n = len(rows)
    blocks = rows.reshape(n, -1, KINDS[kind].nbytes)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2").reshape(n, -1)
    if kind in POINTS:
        nibbles = blocks[:, :, 3:].reshape(n, -1, 16)
        codes = unpack_halves(nibbles).reshape(n, -1, POINTS[kind])
        values = (codes - blocks[:, :, 2:3]).view(np.int8).reshape(n, -1)
        return values, scales.repeat(POINTS[kind] // BLOCK, axis=1)
    if kind in ("Q8_0", "C8"):
        return np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(n, -1), scales
    codes = unpack_halves(blocks[:, :, -16:])
    if kind == "Q5_0":
        codes |= np.unpackbits(blocks[:, :, 2:6], axis=2, bitorder="little") << 4
    return (codes - np.uint8(-RANGES[kind][0])).view(np.int8).reshape(n, -1), scales


def table_rows(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of NF4 or FP4. codes: uint8 [n, k] below 16; scales: float16 [n, k / 32]."""
    rows = blocks_with_scales(scales, KINDS["NF4"].nbytes)
    rows[:, :, 2:] = pack_halves(codes.reshape(*scales.shape, BLOCK))
    return rows.reshape(len(scales), -1)


def mxfp4_rows(packed: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """Rows of MXFP4, uint8 [n, row bytes]. packed: uint8 [n, k / 2], two neighbours a byte. powers: uint8 [n, k / 32]."""
    codes = unpack_fields(np.ascontiguousarray(packed), 4).reshape(*powers.shape, BLOCK)
    rows = np.empty((*powers.shape, KINDS["MXFP4"].nbytes), np.uint8)
    rows[:, :, 0] = powers
    rows[:, :, 1:] = pack_halves(codes)
    return rows.reshape(len(powers), -1)


def map_rows(n: int, make: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Concatenate make(first, last) over slices of n rows, on all threads."""
    starts = range(0, n, TURN)
    with ThreadPoolExecutor(core.processors(), "rows") as threads:
        return np.concatenate(list(threads.map(lambda first: make(first, min(first + TURN, n)), starts)))
