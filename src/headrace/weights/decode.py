"""Dequantisation of stored blocks, by the native core or in numpy with the same bits; also the core's test oracle.

Block layouts: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and `weights.kinds` for the kinds that GGUF lacks.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace import core
from headrace.weights.bits import split_planes, unpack_halves
from headrace.weights.kinds import KINDS
from headrace.weights.source import WeightError, WeightSource

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # 2 * E2M1
NF4_VALUES = np.array([-123, -86, -65, -49, -35, -23, -11, 0, 10, 20, 30, 42, 54, 69, 89, 123], np.float32)
FP4_VALUES = np.array([0, 1, 64, 96, 32, 48, 16, 24, 0, -1, -64, -96, -32, -48, -16, -24], np.float32)

Blocks = np.ndarray  # uint8 [n, bytes of a block] -> float32 [n, elements of a block]
CHUNK = 1 << 20  # elements decoded at a time if a scratch buffer is needed


def dequantize_numpy(data: np.ndarray, kind: str) -> np.ndarray:
    """Whole blocks of `kind`, uint8 [bytes], as float32 [elements]."""
    blocks = np.ascontiguousarray(data).reshape(-1, KINDS[kind].nbytes)
    with np.errstate(all="ignore"):  # damaged scales may be infinite; the loader refuses the result
        return np.ascontiguousarray(DECODERS[kind](blocks), np.float32).reshape(-1)


def _half(blocks: Blocks, at: int) -> np.ndarray:
    """The float16 at a byte of every block, float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _fifth_bits(blocks: Blocks, at: int) -> np.ndarray:
    """Bit i of a 32-bit word belongs to element i. uint8 [n, 32], 0 or 16."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _signed(values: np.ndarray, offset: int) -> np.ndarray:
    return values.astype(np.float32) - np.float32(offset)


def _f32(blocks: Blocks) -> np.ndarray:
    return blocks.view("<f4")


def _f16(blocks: Blocks) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Blocks) -> np.ndarray:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Blocks) -> np.ndarray:
    return _half(blocks, 0) * _signed(unpack_halves(blocks[:, 2:18]), 8)


def _q4_1(blocks: Blocks) -> np.ndarray:
    return _half(blocks, 0) * _signed(unpack_halves(blocks[:, 4:20]), 0) + _half(blocks, 2)


def _q5_0(blocks: Blocks) -> np.ndarray:
    return _half(blocks, 0) * _signed(unpack_halves(blocks[:, 6:22]) | _fifth_bits(blocks, 2), 16)


def _q5_1(blocks: Blocks) -> np.ndarray:
    return _half(blocks, 0) * _signed(unpack_halves(blocks[:, 8:24]) | _fifth_bits(blocks, 4), 0) + _half(blocks, 2)


def _q8_0(blocks: Blocks) -> np.ndarray:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q2_k(blocks: Blocks) -> np.ndarray:
    n = len(blocks)
    q = split_planes(blocks[:, 16:80].reshape(n, 2, 32), 2, 4).reshape(n, 16, 16)
    scale = _half(blocks, 80) * _signed(blocks[:, :16] & 15, 0)
    minimum = _half(blocks, 82) * _signed(blocks[:, :16] >> 4, 0)
    return scale[:, :, None] * _signed(q, 0) - minimum[:, :, None]


def _q3_k(blocks: Blocks) -> np.ndarray:
    n = len(blocks)
    low = split_planes(blocks[:, 32:96].reshape(n, 2, 32), 2, 4).reshape(n, 16, 16)
    high = split_planes(blocks[:, :32], 1, 8).reshape(n, 16, 16) << 2
    nibbles = split_planes(blocks[:, 96:104], 4, 2).reshape(n, 16)
    tops = split_planes(blocks[:, 104:108], 2, 4).reshape(n, 16) << 4
    scale = _half(blocks, 108) * _signed(nibbles | tops, 32)
    return scale[:, :, None] * _signed(low | high, 4)


def _scale_min(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of the eight groups of Q4_K and Q5_K, six bits each in bytes 4..15: float32 [n, 8, 1]."""
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    minimum = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1)
    return (_half(blocks, 0) * _signed(scale, 0))[:, :, None], (_half(blocks, 2) * _signed(minimum, 0))[:, :, None]


def _q4_k(blocks: Blocks) -> np.ndarray:
    n = len(blocks)
    q = split_planes(blocks[:, 16:].reshape(n, 4, 32), 4, 2).reshape(n, 8, 32)
    scale, minimum = _scale_min(blocks)
    return scale * _signed(q, 0) - minimum


def _q5_k(blocks: Blocks) -> np.ndarray:
    n = len(blocks)
    low = split_planes(blocks[:, 48:].reshape(n, 4, 32), 4, 2).reshape(n, 8, 32)
    high = split_planes(blocks[:, 16:48], 1, 8) << 4
    scale, minimum = _scale_min(blocks)
    return scale * _signed(low | high, 0) - minimum


def _q6_k(blocks: Blocks) -> np.ndarray:
    n = len(blocks)
    low = split_planes(blocks[:, :128].reshape(n, 2, 64), 4, 2).reshape(n, 16, 16)
    high = split_planes(blocks[:, 128:192].reshape(n, 2, 32), 2, 4).reshape(n, 16, 16) << 4
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scale[:, :, None] * _signed(low | high, 32)


def _iq4_nl(blocks: Blocks) -> np.ndarray:
    return _half(blocks, 0) * IQ4_VALUES[unpack_halves(blocks[:, 2:18])]


def _nf4(blocks: Blocks) -> np.ndarray:
    return _half(blocks, 0) * NF4_VALUES[unpack_halves(blocks[:, 2:18])]


def _fp4(blocks: Blocks) -> np.ndarray:
    return _half(blocks, 0) * FP4_VALUES[unpack_halves(blocks[:, 2:18])]


def _mxfp4(blocks: Blocks) -> np.ndarray:
    power = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return power.astype(np.float32) * MXFP4_VALUES[unpack_halves(blocks[:, 1:17])]


def _s4(blocks: Blocks) -> np.ndarray:
    nibbles = blocks[:, 6:]
    return _two_of_four(blocks, _signed(unpack_halves(nibbles), 8))


def _s8(blocks: Blocks) -> np.ndarray:
    return _two_of_four(blocks, blocks[:, 6:].view(np.int8).astype(np.float32))


def _g4(blocks: Blocks) -> np.ndarray:
    """A zero point beyond 16 makes numbers NaN."""
    n, zero = len(blocks), blocks[:, 2:3].astype(np.float32)
    scale = np.where(zero > 16, np.float32(np.nan), _half(blocks, 0))
    q = split_planes(blocks[:, 3:].reshape(n, -1, 16), 4, 2).reshape(n, -1)
    return scale * (q.astype(np.float32) - zero)


def _g8(blocks: Blocks) -> np.ndarray:
    return _half(blocks, 0) * (blocks[:, 3:].astype(np.float32) - blocks[:, 2:3].astype(np.float32))


def _two_of_four(blocks: Blocks, kept: np.ndarray) -> np.ndarray:
    """kept: float32 [n, 16], two of every four. Where indices do not ascend numbers are NaN."""
    n = len(blocks)
    indices = split_planes(blocks[:, 2:6, None], 2, 4).reshape(n, 8, 2)
    values = np.zeros((n, 8, 4), np.float32)
    np.put_along_axis(values, indices.astype(np.int64), kept.reshape(n, 8, 2), 2)
    values[indices[:, :, 0] >= indices[:, :, 1]] = np.nan
    return _half(blocks, 0) * values.reshape(n, 32)


def _iq4_xs(blocks: Blocks) -> np.ndarray:
    n = len(blocks)
    low = split_planes(blocks[:, 4:8, None], 4, 2).reshape(n, 8)
    high = split_planes(blocks[:, 2:4, None], 2, 4).reshape(n, 8) << 4
    scale = _half(blocks, 0) * _signed(low | high, 32)
    q = split_planes(blocks[:, 8:].reshape(n, 8, 16), 4, 2).reshape(n, 8, 32)
    return scale[:, :, None] * IQ4_VALUES[q]


DECODERS: dict[str, Callable[[Blocks], np.ndarray]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NF4": _nf4,
    "FP4": _fp4,
    "S4": _s4,
    "S8": _s8,
    "G4_32": _g4,
    "G4_128": _g4,
    "G8_32": _g8,
    "G8_128": _g8,
    "C8": _q8_0,
}


def read_floats(source: WeightSource, name: str) -> np.ndarray:
    """A stored tensor as float32, a new array. Raises WeightError."""
    info = source.info(name)
    values = dequantize(source.raw(name).reshape(-1), info.kind).reshape(info.shape)
    columns = source.columns(name)
    return values if columns is None else values[:, np.argsort(columns)]


def check_finite(values: Any, dtype: Any, name: str, source: WeightSource) -> None:
    """Raise WeightError if a tensor (numpy or torch) holds NaN or infinities.

    The tensor is first summed in `dtype`. That sum may overflow by itself, so only then every value is checked.
    """
    with np.errstate(all="ignore"):
        if math.isfinite(float(values.sum(dtype=dtype))):
            return
        bad = int((values * 0 != 0).sum())
    if bad:
        kind = str(values.dtype).removeprefix("torch.")
        raise WeightError(
            f"{source.path}: tensor {name!r} has {bad} values that are NaN or infinite in {kind}; "
            "the file is damaged, or needs a wider dtype (float32)"
        )


def dequantize(data: np.ndarray, kind: str, out: np.ndarray | None = None) -> np.ndarray:
    """Whole blocks of `kind`, uint8 [bytes] contiguous, as float32 [elements], written to `out` if given."""
    block, block_bytes = KINDS[kind]
    if out is None:
        out = np.empty(data.size // block_bytes * block, np.float32)
    if core.available():
        core.module().dequantize(kind, data, out, core.module().cpu_info()["threads"])
        return out
    step = CHUNK // block * block_bytes
    for start in range(0, data.size, step):
        done = start // block_bytes * block
        out[done : done + CHUNK] = dequantize_numpy(data[start : start + step], kind)
    return out
