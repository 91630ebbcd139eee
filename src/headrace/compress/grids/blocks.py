"""Encoders of GGUF blocks of 32 numbers with a scale, some with a minimum: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4."""

import numpy as np

from headrace.compress.grids.codes import TABLES, pack
from headrace.compress.grids.search import (
    TOO_LARGE,
    Array,
    best_line,
    best_scale,
    error,
    integers,
    inverse,
    keep_better,
    largest,
    to_half,
)
from headrace.weights.decode import IQ4_VALUES

OFFSETS = np.arange(-0.9, 1.3, 0.4)  # in steps beyond the last code; larger values are clipped
LEAST_POWER, MOST_POWER = -24, 15  # exponents of power-of-two scales that float16 holds


def ends(low: float, high: float, step: float = 1.0) -> list[float]:
    """Codes tried for the number farthest from zero when a scale is searched: near the least and the greatest code."""
    return [low - step * by for by in OFFSETS] + [high + step * by for by in OFFSETS]


def halves(*scales: Array) -> Array:
    """float16 scales [blocks] as bytes: uint8 [blocks, 2 * scales]."""
    return np.ascontiguousarray(np.stack(scales, axis=1).astype("<f2")).view(np.uint8)


def q8_0(x: Array, weight: Array | None) -> Array:
    """x [32, blocks] float32 -> uint8 [blocks, bytes]. All encoders of this module have this form."""
    d, q = eight_bits(x, weight)
    return _stored("Q8_0", (d,), (q + 127).astype(np.uint8))


def q4_0(x: Array, weight: Array | None) -> Array:
    d, q = symmetric(x, weight, 8)
    return _stored("Q4_0", (d,), q)


def q5_0(x: Array, weight: Array | None) -> Array:
    d, q = symmetric(x, weight, 16)
    return _stored("Q5_0", (d,), q)


def q4_1(x: Array, weight: Array | None) -> Array:
    d, m, q = _line(x, weight, 15)
    return _stored("Q4_1", (d, m), q)


def q5_1(x: Array, weight: Array | None) -> Array:
    d, m, q = _line(x, weight, 31)
    return _stored("Q5_1", (d, m), q)


def iq4_nl(x: Array, weight: Array | None) -> Array:
    cells = np.searchsorted((IQ4_VALUES[1:] + IQ4_VALUES[:-1]) / 2, np.arange(-256, 256) / 2, side="right")
    # Nearest value to every half step: no decision boundary lies inside one.
    table = IQ4_VALUES[cells]

    def nearest(v: Array) -> Array:
        return table[np.clip(np.floor(2 * v), -256, 255).astype(np.int16) + 256]

    first, last = float(IQ4_VALUES[0]), float(IQ4_VALUES[-1])
    scale = best_scale(x, weight, nearest, ends(first, last, 12.0))
    d, values = _settled(x, weight, nearest, [scale, largest(x) / first])
    return _stored("IQ4_NL", (d,), np.searchsorted(IQ4_VALUES, values).astype(np.uint8))


def mxfp4(x: Array, weight: Array | None) -> Array:
    """Tries three powers of two near the largest number's, and takes the one with the least error.

    The format (OCP Microscaling Formats 1.0) takes the first of them.
    """
    table = TABLES["MXFP4"]
    middles = (table[1:] + table[:-1]) / 2
    first = np.frexp(np.abs(x).max(0))[1] - np.frexp(table[-1])[1]
    if first.max() > MOST_POWER:
        raise ValueError(TOO_LARGE)
    best = [first, np.zeros(x.shape, np.uint8), np.full(x.shape[1], np.inf, np.float32)]
    for step in (0, 1, -1):
        power = np.clip(first + step, LEAST_POWER, MOST_POWER)
        d = np.ldexp(np.float32(1), power)
        rank = np.searchsorted(middles, x / d).astype(np.uint8)
        best = keep_better(best, [power, rank, error(x, d * table[rank], weight)])
    powers, ranks, _ = best
    scales = (powers + 128).astype(np.uint8)
    return np.concatenate([scales[:, None], pack("MXFP4", np.ascontiguousarray(ranks.T))], axis=1)


def _settled(x: Array, weight: Array | None, nearest: object, scales: list[Array]) -> tuple[Array, Array]:
    """Among several scales, rounded to float16, the one with the least error for each block, and its values."""
    assert callable(nearest)
    best = [to_half(scales[0]), np.zeros_like(x), np.full(x.shape[1], np.inf, np.float32)]
    for scale in map(to_half, scales):
        q = nearest(x * inverse(scale))
        best = keep_better(best, [scale, q, error(x, scale * q, weight)])
    return best[0], best[1]


def eight_bits(x: Array, weight: Array | None) -> tuple[Array, Array]:
    """Scale and integers in [-127, 127] of blocks of any size: float32 [blocks], [size, blocks]."""
    nearest = integers(-127, 127)
    return _settled(x, weight, nearest, [largest(np.abs(x)) / 127, best_scale(np.abs(x), weight, nearest, [127])])


def symmetric(x: Array, weight: Array | None, half: int) -> tuple[Array, Array]:
    """Scale of either sign, and codes in [0, 2 * half - 1], uint8 [size, blocks]; code `half` is zero."""
    nearest = integers(-half, half - 1)
    scale = best_scale(x, weight, nearest, ends(-half, half - 1))
    d, q = _settled(x, weight, nearest, [scale, largest(x) / -half])
    return d, (q + half).astype(np.uint8)


def _line(x: Array, weight: Array | None, high: int) -> tuple[Array, Array, Array]:
    """Scale, minimum and codes in [0, high], uint8 [32, blocks]."""
    low, top = x.min(0), x.max(0)
    searched = best_line(x, weight, high, high + OFFSETS)
    best = [np.zeros_like(low), np.zeros_like(low), np.zeros_like(x), np.full_like(low, np.inf)]
    for s, m in (searched, ((top - low) / high, low)):
        d, m = to_half(s), to_half(m)
        q = np.clip(np.rint((x - m) * inverse(d)), 0, high)
        best = keep_better(best, [d, m, q, error(x, d * q + m, weight)])
    return best[0], best[1], best[2].astype(np.uint8)


def _stored(kind: str, scales: tuple[Array, ...], q: Array) -> Array:
    """Scales [blocks] and codes [32, blocks] -> uint8 [blocks, bytes]."""
    return np.concatenate([halves(*scales), pack(kind, np.ascontiguousarray(q.T))], axis=1)
