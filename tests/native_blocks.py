"""Stored weights for the native core's tests: random blocks of every kind, and what they stand for."""

import numpy as np

from headrace.weights.decode import dequantize_numpy
from headrace.weights.kinds import KINDS

# Where the f16 scales lie in a block, in bytes.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "NF4": (0,),
    "FP4": (0,),
    "S4": (0,),
    "S8": (0,),
    "G4_32": (0,),
    "G4_128": (0,),
    "G8_32": (0,),
    "G8_128": (0,),
    "C8": (0,),
}
SPARSE = {"S4": "Q4_0", "S8": "Q8_0"}  # and dense kinds of the same integers
POINTS = ("G4_32", "G4_128")  # with zero points from 0 to 16 in their third byte

INTEGER_KINDS = tuple(SCALES)
FLOAT_KINDS = ("BF16", "F16", "F32")


def random_rows(kind: str, n: int, k: int, seed: int = 0, scales: np.ndarray | None = None) -> np.ndarray:
    """uint8 [n, row bytes]: random integers, and f16 scales drawn from `scales` (default: normal, some of them zero)."""
    rng = np.random.default_rng((seed, n, k, sum(kind.encode())))
    if kind in FLOAT_KINDS:
        return float_rows(kind, rng.standard_normal((n, k)).astype(np.float32))
    block, nbytes = KINDS[kind]
    rows = rng.integers(0, 256, (n, k // block, nbytes), dtype=np.uint8)
    for at in SCALES[kind]:
        shape = (n, k // block)
        normal = rng.standard_normal(shape) * 0.01 * (rng.random(shape) > 0.05)
        drawn = normal if scales is None else rng.choice(scales, shape)
        rows[:, :, at : at + 2] = drawn.astype(np.float16)[..., None].view(np.uint8)
    if kind == "C8":  # one scale a row, not 0: a row of zeros has nothing to test
        first = rows[:, 0, :2].copy().view(np.float16)
        first[first == 0] = 2.0**-7
        rows[:, :, :2] = first.view(np.uint8)[:, None]
    if kind == "MXFP4":  # powers of two that halves hold
        powers = np.array([2.0**-6, 2.0**-5, 2.0**-20, 0.25]) if scales is None else np.abs(scales[scales != 0])
        rows[:, :, 0] = 128 + np.log2(rng.choice(powers, (n, k // block)))
    if kind in POINTS:
        rows[:, :, 2] %= 17
    if kind in SPARSE:  # indices of two that ascend
        low, high = rng.choice([0x4, 0x8, 0xC, 0x9, 0xD, 0xE], (2, n, k // block, 4)).astype(np.uint8)
        rows[:, :, 2:6] = low | high << 4
    return rows.reshape(n, -1)


def float_rows(kind: str, values: np.ndarray) -> np.ndarray:
    """float32 [n, k] stored as BF16 (truncated), F16 or F32."""
    stored = {
        "BF16": lambda: (values.view(np.uint32) >> 16).astype(np.uint16),
        "F16": lambda: values.astype(np.float16),
        "F32": lambda: values,
    }[kind]()
    return np.ascontiguousarray(stored).view(np.uint8)


def dense(rows: np.ndarray, kind: str, k: int) -> np.ndarray:
    """What the rows stand for: float32 [n, k]."""
    return dequantize_numpy(rows.reshape(-1), kind).reshape(len(rows), k)


def columns(kind: str) -> tuple[int, ...]:
    """Widths to test: one block, and an odd number of them (half a tile left over where blocks are small)."""
    block = KINDS[kind].block
    return {1: (1, 63, 172), 32: (32, 160, 192), 128: (128, 384), 256: (256, 768)}[block]


def round_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, ties to even, as float32."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
