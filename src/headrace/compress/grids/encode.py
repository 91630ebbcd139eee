"""Encoding of float32 rows in every GGUF kind but IQ4_XS: the inverse of weights.decode."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from headrace.compress.grids import blocks
from headrace.compress.grids import super as superblocks
from headrace.compress.grids.search import Array
from headrace.weights.bits import bfloat16_bits
from headrace.weights.kinds import KINDS

T = TypeVar("T")
CHUNK = 1 << 16  # numbers encoded at a time: several times as many fit a core's cache


class BlockEncoder(NamedTuple):
    """encode(x [size, groups], weight) -> uint8 [blocks, bytes]. size: numbers that share a scale."""

    size: int
    encode: Callable[[Array, Array | None], Array]


ENCODERS = {
    "Q4_0": BlockEncoder(32, blocks.q4_0),
    "Q4_1": BlockEncoder(32, blocks.q4_1),
    "Q5_0": BlockEncoder(32, blocks.q5_0),
    "Q5_1": BlockEncoder(32, blocks.q5_1),
    "Q8_0": BlockEncoder(32, blocks.q8_0),
    "Q2_K": BlockEncoder(16, superblocks.q2_k),
    "Q3_K": BlockEncoder(16, superblocks.q3_k),
    "Q4_K": BlockEncoder(32, superblocks.q4_k),
    "Q5_K": BlockEncoder(32, superblocks.q5_k),
    "Q6_K": BlockEncoder(16, superblocks.q6_k),
    "IQ4_NL": BlockEncoder(32, blocks.iq4_nl),
    "MXFP4": BlockEncoder(32, blocks.mxfp4),
}
WRITTEN = ("F32", "F16", "BF16", *ENCODERS)


def encode(values: Array, kind: str, importance: Array | None = None, threads: int = 1) -> Array:
    """Rows float32 [n, k] as rows of `kind`: uint8 [n, row bytes].

    importance: float32 [k], weights of the squared errors of the columns (mean square of their inputs). A row's bytes depend on
    that row alone. Raises ValueError for rows that are not whole blocks, for NaN, infinite or too large numbers, and for a kind
    that cannot be written.
    """
    if kind not in WRITTEN:
        raise ValueError(f"{kind} cannot be written; choose one of {', '.join(WRITTEN)}")
    block, nbytes = KINDS[kind]
    n, k = values.shape
    if k % block:
        raise ValueError(f"rows of {k} numbers cannot be divided into the blocks of {block} of {kind}")
    if importance is not None:
        check_importance(importance, k)
    out = np.empty((n, k // block * nbytes), np.uint8)
    step = max(1, CHUNK // k)

    def fill(start: int) -> None:
        out[start : start + step] = _rows(values[start : start + step], kind, importance)

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(fill, range(0, n, step)):
            pass
    return out


def map_slices(values: Array, importance: Array | None, threads: int, make: Callable[[Array], T]) -> list[T]:
    """make(rows) for slices of rows [n, k], on `threads` threads. Raises ValueError for invalid importance and numbers."""
    if importance is not None:
        check_importance(importance, values.shape[1])
    step = max(1, CHUNK // values.shape[1])
    with ThreadPoolExecutor(threads) as pool:
        slices = (check_finite(values[start : start + step]) for start in range(0, len(values), step))
        return list(pool.map(make, slices))


def check_finite(values: Array) -> Array:
    """The same array. Raises ValueError if a number is NaN or infinite."""
    if not np.isfinite(values).all():
        raise ValueError("has numbers that are NaN or infinite")
    return values


def check_importance(importance: Array, k: int) -> None:
    """Raise ValueError unless `importance` is finite, not negative, not all 0, and has k columns."""
    if importance.shape != (k,):
        raise ValueError(f"importance has {importance.size} columns and the matrix {k}; measure it for this model")
    if not np.isfinite(importance).all() or importance.min() < 0 or not importance.any():
        raise ValueError("importance must be finite numbers from 0, not all 0; measure it again")


def _rows(values: Array, kind: str, importance: Array | None) -> Array:
    check_finite(values)
    if kind in FLOAT:
        return FLOAT[kind](np.ascontiguousarray(values, np.float32))
    size, encoder = ENCODERS[kind]
    return encoder(*columns(values, size, importance))[: values.size // KINDS[kind].block].reshape(len(values), -1)


def columns(values: Array, size: int, importance: Array | None) -> tuple[Array, Array | None]:
    """Rows [n, k] as [size, groups], and the weight of each number. A single group is doubled: numpy sums a single column in
    another order.
    """
    x = np.ascontiguousarray(values.reshape(-1, size).T, np.float32)
    weight = None
    if importance is not None:
        scaled = (importance / importance.mean(dtype=np.float64)).astype(np.float32)
        weight = np.ascontiguousarray(np.tile(np.maximum(scaled, 1e-6), (len(values), 1)).reshape(-1, size).T)
    if x.shape[1] == 1:
        x, weight = x.repeat(2, 1), None if weight is None else weight.repeat(2, 1)
    return x, weight


def _f16(values: Array) -> Array:
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if np.isinf(halves).any():
        raise ValueError("has numbers beyond 65504, the largest of F16; write it as BF16 or F32")
    return halves.view(np.uint8)


def _bf16(values: Array) -> Array:
    """Round to nearest even."""
    rounded = bfloat16_bits(values)
    if (rounded & 0x7F80 == 0x7F80).any():
        raise ValueError("has numbers too large for BF16; write it as F32")
    return rounded.view(np.uint8)


FLOAT: dict[str, Callable[[Array], Array]] = {"F32": lambda values: values.view(np.uint8), "F16": _f16, "BF16": _bf16}
