"""Encoders of super-blocks of 256 numbers: groups of 16 or 32 with small integers as scales (and minima), in units of float16.

Q2_K, Q4_K and Q5_K have scales and minima, Q3_K and Q6_K scales. Groups are fitted first; then the units are fitted to the
groups' integers, and each group's integers are chosen again among their neighbours by the error with these units.
"""

from functools import reduce

import numpy as np

from headrace.compress.grids.blocks import OFFSETS, ends, halves
from headrace.compress.grids.codes import pack
from headrace.compress.grids.search import (
    Array,
    best_line,
    best_scale,
    error,
    integers,
    inverse,
    keep_better,
    largest,
    line,
    to_half,
    total,
)
from headrace.weights.bits import join_planes

ROUNDS = 1  # refits of the units; a second one changes the error by less than 1 %


def q2_k(x: Array, weight: Array | None) -> Array:
    """x [16, groups] of super-blocks -> uint8 [super-blocks, bytes]. All encoders here have this form (Q4_K, Q5_K: x [32,
    groups]).
    """
    d, dm, sc, mn, q = _lines(x, weight, 3, 15, 16)
    return np.concatenate([sc | mn << 4, pack("Q2_K", q), halves(d, dm)], axis=1)


def q4_k(x: Array, weight: Array | None) -> Array:
    d, dm, sc, mn, q = _lines(x, weight, 15, 63, 8)
    return np.concatenate([halves(d, dm), _six_bits(sc, mn), pack("Q4_K", q)], axis=1)


def q5_k(x: Array, weight: Array | None) -> Array:
    d, dm, sc, mn, q = _lines(x, weight, 31, 63, 8)
    return np.concatenate([halves(d, dm), _six_bits(sc, mn), pack("Q5_K", q)], axis=1)


def q3_k(x: Array, weight: Array | None) -> Array:
    d, sc, q = _scales(x, weight, 4, 32)
    sc = (sc + 32).astype(np.uint8)
    nibbles = join_planes((sc & 15).reshape(-1, 2, 8), 4)
    tops = join_planes((sc >> 4).reshape(-1, 4, 4), 2)
    return np.concatenate([pack("Q3_K", q), nibbles, tops, halves(d)], axis=1)


def q6_k(x: Array, weight: Array | None) -> Array:
    d, sc, q = _scales(x, weight, 32, 128)
    return np.concatenate([pack("Q6_K", q), sc.astype(np.int8).view(np.uint8), halves(d)], axis=1)


def _scales(x: Array, weight: Array | None, half: int, most: int) -> tuple[Array, Array, Array]:
    """x ≈ d * sc * (q - half): units [super-blocks], scales in [-most, most - 1] [super-blocks, 16], codes uint8 [super-blocks,
    256].
    """
    nearest = integers(-half, half - 1)
    wanted = best_scale(x, weight, nearest, ends(-half, half - 1)).reshape(-1, 16)
    d = to_half(largest(wanted.T) / -most)
    best: list[Array] = []
    for refit in range(ROUNDS + 1):
        scales = np.clip(np.rint(wanted * inverse(d)[:, None]), -most, most - 1)
        scales, q, miss = _nearby(x, weight, d, scales, most, nearest)
        best = _better(best, [d, scales, q], _summed(miss, 16))
        if refit < ROUNDS:
            steps = scales.reshape(-1) * q
            xs, ss = (_summed(total(weight, steps, by), 16) for by in (x, steps))
            d = to_half(np.where(ss > 0, xs * inverse(ss), d))
    return best[0], best[1].astype(np.int16), (best[2] + half).astype(np.uint8).T.reshape(-1, 256)


def _nearby(x: Array, weight: Array | None, d: Array, scales: Array, most: int, nearest: object) -> tuple[Array, Array, Array]:
    """For each group the best of a scale and its two neighbours, its codes [16, groups], and the error [groups]."""
    assert callable(nearest)
    best: list[Array] = []
    for by in (0, -1, 1):
        tried = np.clip(scales + by, -most, most - 1)
        step = (d[:, None] * tried).reshape(-1)
        q = nearest(x * inverse(step))
        new = [tried.reshape(-1), q, error(x, step * q, weight)]
        best = keep_better(best or new, new)
    return best[0].reshape(scales.shape), best[1], best[2]


def _lines(x: Array, weight: Array | None, high: int, most: int, groups: int) -> tuple[Array, ...]:
    """x ≈ d * sc * q - dm * mn: units [super-blocks], integers up to `most` [super-blocks, groups], codes uint8 [super-blocks,
    256].
    """
    s, m = (one.reshape(-1, groups) for one in best_line(x, weight, high, high + OFFSETS, most=0.0))
    d, dm = to_half(s.max(1) / most), to_half(-m.min(1) / most)
    best: list[Array] = []
    for refit in range(ROUNDS + 1):
        sc = np.clip(np.rint(s * inverse(d)[:, None]), 0, most)
        mn = np.clip(np.rint(-m * inverse(dm)[:, None]), 0, most)
        sc, mn, q, miss = _nearby_lines(x, weight, (d, dm), (sc, mn), (high, most))
        best = _better(best, [d, dm, sc, mn, q], _summed(miss, groups))
        if refit < ROUNDS:
            d, dm = _units(x, weight, sc, mn, q, (d, dm))
            s, m, _ = (one.reshape(-1, groups) for one in line(x, q, weight, most=0.0))
    d, dm, sc, mn, q = best[:-1]
    return d, dm, sc.astype(np.uint8), mn.astype(np.uint8), q.astype(np.uint8).T.reshape(-1, 256)


def _nearby_lines(
    x: Array, weight: Array | None, units: tuple[Array, Array], integers: tuple[Array, Array], bounds: tuple[int, int]
) -> tuple[Array, Array, Array, Array]:
    """For each group the best of its scale and minimum and their neighbours, its codes, and the error [groups]."""
    (d, dm), (sc, mn), (high, most) = units, integers, bounds
    best: list[Array] = []
    for by_scale in (0, -1, 1):
        for by_min in (0, -1, 1):
            tried = [np.clip(sc + by_scale, 0, most), np.clip(mn + by_min, 0, most)]
            step, low = (d[:, None] * tried[0]).reshape(-1), (dm[:, None] * tried[1]).reshape(-1)
            q = np.clip(np.rint((x + low) * inverse(step)), 0, high)
            new = [tried[0].reshape(-1), tried[1].reshape(-1), q, error(x, step * q - low, weight)]
            best = keep_better(best or new, new)
    return best[0].reshape(sc.shape), best[1].reshape(mn.shape), best[2], best[3]


def _units(x: Array, weight: Array | None, sc: Array, mn: Array, q: Array, old: tuple[Array, Array]) -> tuple[Array, Array]:
    """Least squares of the units (d, dm) for given integers and codes, as float16; `old` if there is no solution."""
    count = sc.shape[1]
    a, b = sc.reshape(-1) * q, np.tile(-mn.reshape(1, -1), (len(q), 1))
    aa, ab, bb, ax, bx = (_summed(total(weight, *pair), count) for pair in ((a, a), (a, b), (b, b), (a, x), (b, x)))
    det = inverse(aa * bb - ab * ab)
    d, dm = (bb * ax - ab * bx) * det, (aa * bx - ab * ax) * det
    alone = det == 0
    d = np.where(alone, ax * inverse(aa), d)
    fits = (d > 0) & (alone | (dm >= 0))
    return to_half(np.where(fits, d, old[0])), to_half(np.where(fits & ~alone, dm, old[1]))


def _summed(groups: Array, count: int) -> Array:
    """Sums over the `count` groups of each super-block, in order: numpy's order depends on their number."""
    sums: Array = reduce(np.add, groups.reshape(-1, count).T)
    return sums


def _better(best: list[Array], new: list[Array], miss: Array) -> list[Array]:
    """For each super-block the arrays with the smaller error; the last array of a list is the error."""
    new = [*new, miss]
    if not best:
        return new
    wins = miss < best[-1]
    chosen = []
    for one, old in zip(new, best, strict=True):
        if one.shape[0] == len(wins):
            chosen.append(np.where(wins.reshape(-1, *(1,) * (one.ndim - 1)), one, old))
        else:  # [size, groups]
            chosen.append(np.where(wins.repeat(one.shape[1] // len(wins)), one, old))
    return chosen


def _six_bits(sc: Array, mn: Array) -> Array:
    """Eight scales and minima of six bits -> uint8 [super-blocks, 12]."""
    a, b = sc[:, :4] | sc[:, 4:] >> 4 << 6, mn[:, :4] | mn[:, 4:] >> 4 << 6
    return np.concatenate([a, b, sc[:, 4:] & 15 | (mn[:, 4:] & 15) << 4], axis=1)
