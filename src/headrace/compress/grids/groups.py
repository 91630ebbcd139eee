"""Integers with one scale for a group of inputs or a row, with or without zero points (schemes.base.IntegerFormat).

Scales are searched as those of GGUF blocks are (grids.search).
"""

from typing import NamedTuple

import numpy as np

from headrace.compress.grids.blocks import eight_bits, symmetric
from headrace.compress.grids.encode import columns, map_slices
from headrace.compress.grids.search import MOST, TOO_LARGE, Array, error, inverse, keep_better, to_half, total
from headrace.weights.schemes.base import IntegerFormat
from headrace.weights.schemes.rows import BLOCK, integer_rows

CUTS = np.arange(1.0, 0.7, -0.05)  # shares of the range that are covered; the rest is clipped


class Fitted(NamedTuple):
    """Rows [n, k] as scale * integers; with zero points the integers are in [-zero, 2**bits - 1 - zero].

    scale: float32 [n, groups], float16 values. zero: int16 [n, groups], 0 if symmetric. integers: int8 [n, k].
    """

    scale: Array  # float32 [n, groups], halves
    zero: Array  # int16 [n, groups]; 0 where integers are symmetric
    integers: Array  # int8 [n, k]


def fit(values: Array, of: IntegerFormat, importance: Array | None = None, threads: int = 1) -> Fitted:
    """Scales, zero points and integers of rows float32 [n, k]. importance: [k], as in `encode`.

    A row's result depends on that row alone. Raises ValueError for rows that are not whole groups, and for NaN, infinite or too
    large numbers.
    """
    k = values.shape[1]
    if not of.fits(k):
        raise ValueError(
            f"rows of {k} numbers cannot be divided into groups of {of.group or k}; sizes are multiples of {BLOCK}"
        )
    fitted = map_slices(values, importance, threads, lambda rows: _rows(rows, of, importance))
    return Fitted(*(np.concatenate(part) for part in zip(*fitted, strict=True)))


def stored(of: IntegerFormat, scale: Array, integers: Array) -> Array:
    """Rows of `of.kind`: uint8 [n, row bytes]."""
    blocks = integers.shape[1] // BLOCK // scale.shape[1]
    return integer_rows(of.kind, np.ascontiguousarray(integers), np.repeat(scale, blocks, axis=1).astype(np.float16))


def _rows(values: Array, of: IntegerFormat, importance: Array | None) -> Fitted:
    n, k = values.shape
    groups = of.groups(k)
    x, weight = columns(values, k // groups, importance)
    scale, zero, q = _search(of, x, weight)
    integers = np.ascontiguousarray(q[:, : n * groups].T).astype(np.int8).reshape(n, k)
    return Fitted(scale[: n * groups].reshape(n, groups), zero[: n * groups].reshape(n, groups).astype(np.int16), integers)


def _search(of: IntegerFormat, x: Array, weight: Array | None) -> tuple[Array, Array, Array]:
    """Scales, zero points, and integers less zero points, of groups x [size, groups]."""
    if not of.symmetric:
        return _with_zero(x, weight, (1 << of.bits) - 1)
    if of.bits == 8:
        scale, q = eight_bits(x, weight)
        return scale, np.zeros_like(scale), q
    half = 1 << of.bits - 1
    scale, codes = symmetric(x, weight, half)
    return scale, np.zeros_like(scale), codes.astype(np.int16) - half


def _with_zero(x: Array, weight: Array | None, most: int) -> tuple[Array, Array, Array]:
    """Tries several shares of the range, each with the best scale for its integers; returns the one with the least error. 0 is
    exact.
    """
    if np.abs(x).max() > MOST:
        raise ValueError(TOO_LARGE)
    low, top = np.minimum(x.min(0), 0), np.maximum(x.max(0), 0)
    best = [np.zeros_like(low), np.zeros_like(low), np.zeros_like(x), np.full_like(low, np.inf)]
    for cut in CUTS.astype(np.float32):
        scale = to_half((top - low) * (cut / np.float32(most)))
        zero = np.clip(np.rint(-low * cut * inverse(scale)), 0, most)
        for refit in range(2):
            q = np.clip(np.rint(x * inverse(scale)), -zero, most - zero)
            best = keep_better(best, [scale, zero, q, error(x, scale * q, weight)])
            if not refit:
                scale = to_half(total(weight, q, x) * inverse(total(weight, q, q)))
    return best[0], best[1], best[2]
