"""Search for scales: the scale (and minimum) of a block with the least weighted squared error.

Blocks are columns: x [size, blocks] float32, so that sums over a block run along the first axis. weight: importance of each
number, same shape; None: equal. For each candidate scale the numbers are rounded, and the best scale for these codes is a least
squares problem with a closed form; the candidate with the least error wins.
"""

from collections.abc import Callable, Sequence

import numpy as np

Array = np.ndarray
MOST = 1e15  # largest number: squares stay finite; float16 scales are far smaller
TOO_LARGE = "has numbers too large for a 16-bit scale; keep it as F32 or BF16"

Nearest = Callable[[Array], Array]  # numbers in units of the scale -> the allowed values next to them, same shape


def to_half(values: Array) -> Array:
    """Round float32 to float16 and back. Raises ValueError if a value becomes infinite."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16).astype(np.float32)
    if not np.isfinite(rounded).all():
        raise ValueError(TOO_LARGE)
    return rounded


def inverse(scale: Array) -> Array:
    """1 / scale, or 0 if that is not finite: a scale of 0 belongs to zeros."""
    with np.errstate(divide="ignore", over="ignore"):
        inverted = np.float32(1) / scale
    return np.where(np.isfinite(inverted), inverted, np.float32(0)).astype(np.float32, copy=False)


def integers(low: int, high: int) -> Nearest:
    """Rounding to integers in [low, high], ties to even."""
    return lambda x: np.clip(np.rint(x), low, high)


def total(weight: Array | None, *factors: Array) -> Array:
    """Sum over each block of weight times factors: float32 [blocks]."""
    product = factors[0] if weight is None else weight * factors[0]
    for factor in factors[1:]:
        product = product * factor
    return np.asarray(product.sum(0, dtype=np.float32))


def error(x: Array, rounded: Array, weight: Array | None) -> Array:
    """Weighted squared error of each block [blocks]."""
    gap = x - rounded
    return total(weight, gap, gap)


def keep_better(best: Sequence[Array], new: Sequence[Array]) -> list[Array]:
    """For each block the candidate with the smaller error; arrays are [..., blocks], the last one the error [blocks]."""
    wins = new[-1] < best[-1]
    return [np.where(wins, one, old) for one, old in zip(new, best, strict=True)]


def largest(x: Array) -> Array:
    """The number of each block farthest from zero, with its sign [blocks]."""
    top, bottom = x.max(0), x.min(0)
    return np.where(top > -bottom, top, bottom)


def best_scale(x: Array, weight: Array | None, nearest: Nearest, ends: Sequence[float]) -> Array:
    """Scale s of x ≈ s * q for each block [blocks], of either sign, not yet float16.

    ends: values of q tried for the number farthest from zero.
    """
    if np.abs(x).max() > MOST:
        raise ValueError(TOO_LARGE)
    unit = inverse(largest(x))
    best, gain = np.zeros_like(unit), np.full_like(unit, -1)
    for end in ends:
        q = nearest(x * (np.float32(end) * unit))
        wq = q if weight is None else weight * q
        xq, qq = total(None, wq, x), total(None, wq, q)
        scale = xq * inverse(qq)
        reduction = xq * scale  # reduction of the error, compared with zeros
        better = reduction > gain
        best, gain = np.where(better, scale, best), np.where(better, reduction, gain)
    return best


def best_line(x: Array, weight: Array | None, high: int, steps: Array, most: float = np.inf) -> tuple[Array, Array]:
    """Scale s ≥ 0 and minimum m ≤ `most` of x ≈ s * q + m, q in [0, high], for each block [blocks].

    steps: numbers of steps tried for the range between the least and the largest number.
    """
    low = np.minimum(x.min(0), np.float32(most))
    span = inverse(np.maximum(x.max(0) - low, 0))
    best = [np.zeros_like(low), low.copy()]
    gain = np.full_like(low, -np.inf)
    for step in steps:
        s, m = inverse(np.float32(step) * span), low
        for _ in range(2):
            q = np.clip(np.rint((x - m) * inverse(s)), 0, high)
            s, m, reduction = line(x, q, weight, most)
            better = reduction > gain
            best = [np.where(better, new, old) for new, old in zip((s, m), best, strict=True)]
            gain = np.where(better, reduction, gain)
    return best[0], best[1]


def line(x: Array, q: Array, weight: Array | None, most: float = np.inf) -> tuple[Array, Array, Array]:
    """Least squares of x ≈ s * q + m for codes q: s ≥ 0, m ≤ `most`, and the reduction of the error, compared with zeros."""
    sw = np.float32(len(x)) if weight is None else weight.sum(0, dtype=np.float32)
    wq = q if weight is None else weight * q
    sq, sqq, sx, sxq = wq.sum(0, dtype=np.float32), total(None, wq, q), total(weight, x), total(None, wq, x)
    det = inverse(sw * sqq - sq * sq)
    s, m = (sw * sxq - sq * sx) * det, (sqq * sx - sq * sxq) * det
    # Equal or falling codes: fit a constant.
    flat = (det == 0) | (s < 0)
    s, m = np.where(flat, 0, s), np.where(flat, sx * inverse(sw + np.zeros_like(sx)), m)
    over = m > most
    s, m = np.where(over, np.maximum(sxq - np.float32(min(most, 0)) * sq, 0) * inverse(sqq), s), np.where(over, most, m)
    fall = 2 * (s * sxq + m * sx) - s * s * sqq - 2 * s * m * sq - m * m * sw
    return s.astype(np.float32), m.astype(np.float32), fall
