"""Integers and their scales as rows of a kind: exact wherever the scales are halves, because a kind has a fixed zero and
integer minus zero point is an integer again.

    q - z of up to 4 bits, any z:   G4_128 where groups are of a multiple of 128 inputs, w = d * (q - z)
    the same in other groups:   Q4_0 where z = 8, w = d * (q - 8), else G4_32
    q - z of 5 bits, z = 16:    Q5_0, w = d * (q - 16)
    q - z of up to 7 bits, any z, and of 8 bits, z = 128:   Q8_0, w = d * (q - z)
    q - z of 8 bits, any z:     G8_128 where groups are of a multiple of 128 inputs, else G8_32, w = d * (q - z)
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from headrace import core as native
from headrace.weights.kinds import KINDS

BLOCK = 32
TURN = 256  # rows at a time
RANGES = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}  # of the integers, by bits
POINTS = {"G4_128": 128, "G4_32": 32}  # kinds with zero points, and the inputs that share one
WIDE = {"G8_128": 128, "G8_32": 32}  # and of bytes
MOST_POINT = 16


def kind_of(bits: int, low: int, high: int, group: int) -> str:
    """The narrowest kind for codes of `bits` that, less their zero points, are from `low` to `high`, with a scale and a zero
    point for `group` inputs (0: of any number)."""
    if bits <= 4 and group and group % POINTS["G4_128"] == 0:
        return "G4_128"
    found = next((kind for kind, (least, most) in RANGES.items() if least <= low and high <= most), "")
    if bits <= 4 and found != "Q4_0":
        return "G4_32"
    return found or ("G8_128" if group and group % WIDE["G8_128"] == 0 else "G8_32")


def unpacked(words: np.ndarray, bits: int, padded: bool = False) -> np.ndarray:
    """Fields of up to 8 bits, lowest first, of each row of words (contiguous): uint8 [n, fields]. They run on from word to
    word; `padded`: each word has whole ones, and bits that are left over."""
    data = words.view(np.uint8)
    if bits == 8:
        return data
    if 8 % bits:
        flat = np.unpackbits(data, axis=1, bitorder="little")
        if padded:
            flat = flat.reshape(-1, 32)
        whole = flat[:, : flat.shape[1] // bits * bits]
        return np.packbits(whole.reshape(-1, bits), axis=1, bitorder="little").reshape(len(data), -1)
    each = 8 // bits
    made = np.empty((len(data), each * data.shape[1]), np.uint8)
    for field in range(each):
        made[:, field::each] = data >> (field * bits) & ((1 << bits) - 1)
    return made


def packed(fields: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpacked`: uint8 [n, m] below 2^bits as words, int32 [n, ⌈m · bits / 32⌉]; what is missing is 0."""
    n, m = fields.shape
    if 8 % bits:
        flat = np.unpackbits(fields[:, :, None], axis=2, count=bits, bitorder="little").reshape(n, m * bits)
        return np.packbits(np.pad(flat, ((0, 0), (0, -m * bits % 32))), axis=1, bitorder="little").view("<i4")
    each = 8 // bits
    whole = np.zeros((n, -(-m * bits // 32) * 4 * each), np.uint8)
    whole[:, :m] = fields
    made = np.zeros((n, whole.shape[1] // each), np.uint8)
    for field in range(each):
        made |= whole[:, field::each] << (field * bits)
    return made.view("<i4")


def coded_rows(kind: str, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of a kind that `kind_of` names. codes: uint8 [n, k]; zeros (points): uint8, and scales: float16 [n, k / 32]."""
    n, blocks = scales.shape
    each = codes.reshape(n, blocks, BLOCK)
    if kind in WIDE:
        return _wide_rows(kind, codes, zeros, scales)
    return rows_of(kind, (each - zeros[:, :, None]).view(np.int8).reshape(n, -1), scales)


def rows_of(kind: str, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of a kind of RANGES or POINTS. values: int8 [n, k]; scales: float16 [n, k / 32]; uint8 [n, row bytes]."""
    if kind in POINTS:
        return _point_rows(kind, values, scales)
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


def _point_rows(kind: str, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """With the least zero point that leaves no integer of a group below 0: as good as any other. Raises ValueError where the
    integers of one are more than 15 apart."""
    n, each = len(values), POINTS[kind] // BLOCK
    groups = values.reshape(n, -1, POINTS[kind])
    zeros = np.maximum(-groups.min(2).astype(np.int16), 0)
    codes = groups.astype(np.int16) + zeros[:, :, None]
    if codes.size and (codes.max() > 15 or zeros.max() > MOST_POINT):
        raise ValueError("a group has integers that 4 bits and a zero point do not hold")
    made = np.empty((*zeros.shape, KINDS[kind].nbytes), np.uint8)
    made[:, :, :2] = np.ascontiguousarray(scales[:, ::each], "<f2").view(np.uint8).reshape(*zeros.shape, 2)
    made[:, :, 2] = zeros
    nibbles = _nibbles(codes.astype(np.uint8).reshape(n, -1, BLOCK))
    made[:, :, 3:] = nibbles.reshape(*zeros.shape, -1)
    return made.reshape(n, -1)


def _wide_rows(kind: str, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    n, each = len(codes), WIDE[kind] // BLOCK
    made = np.empty((n, codes.shape[1] // WIDE[kind], KINDS[kind].nbytes), np.uint8)
    made[:, :, :2] = np.ascontiguousarray(scales[:, ::each], "<f2").view(np.uint8).reshape(n, -1, 2)
    made[:, :, 2] = zeros[:, ::each]
    made[:, :, 3:] = codes.reshape(n, -1, WIDE[kind])
    return made.reshape(n, -1)


def integers_of(kind: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `rows_of`: int8 [n, k] and float16 [n, k / 32]."""
    n = len(rows)
    blocks = rows.reshape(n, -1, KINDS[kind].nbytes)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2").reshape(n, -1)
    if kind in POINTS:
        nibbles = blocks[:, :, 3:].reshape(n, -1, 16)
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(n, -1, POINTS[kind])
        values = (codes - blocks[:, :, 2:3]).view(np.int8).reshape(n, -1)
        return values, scales.repeat(POINTS[kind] // BLOCK, axis=1)
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
