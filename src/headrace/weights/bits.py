"""Packing of small integers into bytes and 32-bit words, and back. All arrays are uint8 unless stated."""

import numpy as np


def unpack_fields(words: np.ndarray, bits: int, padded: bool = False) -> np.ndarray:
    """Bit fields of each row of words, lowest first: [n, fields].

    words: [n, m] of any integer type, contiguous. bits: 1 to 8. Fields run on from word to word; if `padded`, each 32-bit word
    holds whole fields only, and its highest bits are unused.
    """
    data = words.view(np.uint8)
    if bits == 8:
        return data
    if 8 % bits:
        flat = np.unpackbits(data, axis=1, bitorder="little")
        if padded:
            flat = flat.reshape(-1, 32)
        whole = flat[:, : flat.shape[1] // bits * bits]
        return np.packbits(whole.reshape(-1, bits), axis=1, bitorder="little").reshape(len(data), -1)
    per_byte = 8 // bits
    fields = np.empty((len(data), per_byte * data.shape[1]), np.uint8)
    for place in range(per_byte):
        fields[:, place::per_byte] = data >> (place * bits) & ((1 << bits) - 1)
    return fields


def pack_fields(fields: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpack_fields`: [n, m] below 2**bits as words, int32 [n, ceil(m * bits / 32)], filled up with zeros."""
    n, m = fields.shape
    if 8 % bits:
        flat = np.unpackbits(fields[:, :, None], axis=2, count=bits, bitorder="little").reshape(n, m * bits)
        return np.packbits(np.pad(flat, ((0, 0), (0, -m * bits % 32))), axis=1, bitorder="little").view("<i4")
    padded = np.zeros((n, -(-m * bits // 32) * 32 // bits), np.uint8)
    padded[:, :m] = fields
    return _join(padded, 8 // bits, bits).view("<i4")


def pack_pairs(codes: np.ndarray) -> np.ndarray:
    """4-bit codes [n, k] as bytes [n, k / 2]: neighbours share a byte, the first in its low half."""
    return _join(codes, 2, 4)


def _join(fields: np.ndarray, per_byte: int, bits: int) -> np.ndarray:
    joined = np.zeros((len(fields), fields.shape[1] // per_byte), np.uint8)
    for place in range(per_byte):
        joined |= fields[:, place::per_byte] << (place * bits)
    return joined


def pack_halves(codes: np.ndarray) -> np.ndarray:
    """4-bit codes [..., m] as bytes [..., m / 2]: the first half of the codes low, the second half high (blocks of GGUF)."""
    half = codes.shape[-1] // 2
    joined: np.ndarray = codes[..., :half] | codes[..., half:] << 4
    return joined


def unpack_halves(data: np.ndarray) -> np.ndarray:
    """The inverse of `pack_halves`: [..., m / 2] as codes [..., m]."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def split_planes(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """`count` fields of `bits` bits of every byte, lowest first, on a new axis before the last: [..., count, bytes]."""
    shifts = np.arange(count, dtype=np.uint8)[:, None] * np.uint8(bits)
    return data[..., None, :] >> shifts & np.uint8((1 << bits) - 1)


def join_planes(values: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `split_planes`: [..., count, bytes] as [..., bytes]."""
    shifts = np.arange(values.shape[-2], dtype=np.uint8)[:, None] * np.uint8(bits)
    return np.bitwise_or.reduce(values << shifts, axis=-2)


def blocks_with_scales(scales: np.ndarray, nbytes: int) -> np.ndarray:
    """Blocks [n, blocks, nbytes] that start with their scales, float16 [n, blocks]; all other bytes are unset."""
    blocks = np.empty((*scales.shape, nbytes), np.uint8)
    blocks[:, :, :2] = np.ascontiguousarray(scales, "<f2").view(np.uint8).reshape(*scales.shape, 2)
    return blocks


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Finite values rounded to bfloat16, to nearest even, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: np.ndarray = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded
