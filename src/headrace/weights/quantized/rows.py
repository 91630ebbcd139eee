"""Integers and their scales as rows of a kind: exact wherever the scales are halves, because a kind has a fixed zero and
integer minus zero point is an integer again.

    q - z of 4 bits, z = 8:     Q4_0, w = d * (q - 8)
    q - z of 4 bits, any z:     Q5_0, w = d * ((q - z + 16) - 16), as q - z is from -16 to 15
    q - z of 8 bits, z = 128:   Q8_0, w = d * (q - 128)
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from headrace import native
from headrace.weights.kinds import KINDS

BLOCK = 32
TURN = 256  # rows at a time
RANGES = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}  # of the integers, by bits


def kind_of(low: int, high: int) -> str | None:
    """The narrowest kind with integers from `low` to `high`; None where no kind has them."""
    return next((kind for kind, (least, most) in RANGES.items() if least <= low and high <= most), None)


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Fields of 2, 4 or 8 bits, lowest first, of each row of words (contiguous): uint8 [n, fields]."""
    data = words.view(np.uint8)
    if bits == 8:
        return data
    each = 8 // bits
    made = np.empty((len(data), each * data.shape[1]), np.uint8)
    for field in range(each):
        made[:, field::each] = data >> (field * bits) & ((1 << bits) - 1)
    return made


def packed(fields: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpacked`: uint8 [n, m] below 2^bits as words, int32 [n, ⌈m · bits / 32⌉]; what is missing is 0."""
    each = 8 // bits
    n, m = fields.shape
    whole = np.zeros((n, -(-m * bits // 32) * 4 * each), np.uint8)
    whole[:, :m] = fields
    made = np.zeros((n, whole.shape[1] // each), np.uint8)
    for field in range(each):
        made |= whole[:, field::each] << (field * bits)
    return made.view("<i4")


def rows_of(kind: str, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of a kind of RANGES. values: int8 [n, k]; scales: float16 [n, k / 32]; uint8 [n, row bytes]."""
    n, blocks = scales.shape
    made = np.empty((n, blocks, KINDS[kind].nbytes), np.uint8)
    made[:, :, :2] = np.ascontiguousarray(scales, "<f2").view(np.uint8).reshape(n, blocks, 2)
    offset = values.reshape(n, blocks, BLOCK).view(np.uint8)
    if kind == "Q8_0":
        made[:, :, 2:] = offset
        return made.reshape(n, -1)
    offset = offset + np.uint8(-RANGES[kind][0])
    if kind == "Q5_0":
        made[:, :, 2:6] = np.packbits(offset >> 4, axis=2, bitorder="little")
    made[:, :, -16:] = _nibbles(offset & 15)
    return made.reshape(n, -1)


def integers_of(kind: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `rows_of`: int8 [n, k] and float16 [n, k / 32]."""
    n = len(rows)
    blocks = rows.reshape(n, -1, KINDS[kind].nbytes)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2").reshape(n, -1)
    if kind == "Q8_0":
        return np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(n, -1), scales
    codes = np.concatenate([blocks[:, :, -16:] & 15, blocks[:, :, -16:] >> 4], axis=2)
    if kind == "Q5_0":
        codes |= np.unpackbits(blocks[:, :, 2:6], axis=2, bitorder="little") << 4
    return (codes - np.uint8(-RANGES[kind][0])).view(np.int8).reshape(n, -1), scales


def table_rows(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of NF4 or FP4. codes: uint8 [n, k] below 16; scales: float16 [n, k / 32]."""
    n, blocks = scales.shape
    each = codes.reshape(n, blocks, BLOCK)
    made = np.empty((n, blocks, KINDS["NF4"].nbytes), np.uint8)
    made[:, :, :2] = np.ascontiguousarray(scales, "<f2").view(np.uint8).reshape(n, blocks, 2)
    made[:, :, 2:] = _nibbles(each)
    return made.reshape(n, -1)


def mxfp4_rows(packed: np.ndarray, powers: np.ndarray) -> np.ndarray:
    """Rows of MXFP4, whose blocks have the columns 0 to 15 in low halves of bytes, of bytes with two neighbours each, the low
    half first. packed: uint8 [n, k / 2]; powers: uint8 [n, k / 32]."""
    codes = unpacked(np.ascontiguousarray(packed), 4).reshape(*powers.shape, BLOCK)
    made = np.empty((*powers.shape, KINDS["MXFP4"].nbytes), np.uint8)
    made[:, :, 0] = powers
    made[:, :, 1:] = _nibbles(codes)
    return made.reshape(len(powers), -1)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Columns 0 to 15 of each block in the low halves of bytes, 16 to 31 in the high ones. codes: uint8 [n, blocks, 32]."""
    joined: np.ndarray = codes[:, :, :16] | codes[:, :, 16:] << 4
    return joined


def by_turns(n: int, make: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """make(first, last) for some rows after others, on all threads, joined."""
    starts = range(0, n, TURN)
    with ThreadPoolExecutor(native.processors(), "rows") as threads:
        return np.concatenate(list(threads.map(lambda first: make(first, min(first + TURN, n)), starts)))
