"""Attention bias by distance (T5, MPNet) as the native core takes it."""

import math

import numpy as np


def bias_by_distance(weight: np.ndarray, most: int, both: bool) -> np.ndarray:
    """Attention bias by distance (key - query) from -most to most, [heads, 2 * most + 1] float32. Farther keys have the last.

    weight: [buckets, heads].
    """
    added: np.ndarray = weight[buckets(np.arange(-most, most + 1), len(weight), most, both)].T
    return np.ascontiguousarray(added, np.float32)


def buckets(distance: np.ndarray, count: int, most: int, both: bool) -> np.ndarray:
    """The bucket (of `count`) of each distance, as `ops.attention.buckets` computes it."""
    base = np.zeros_like(distance)
    if both:
        count //= 2
        base = (distance > 0) * count
        far = np.abs(distance)
    else:
        far = np.maximum(-distance, 0)
    exact = count // 2
    ratio = np.maximum(far, exact).astype(np.float32) / np.float32(exact)
    grown = np.log(ratio) / np.float32(math.log(most / exact)) * np.float32(count - exact)
    large = np.minimum(exact + grown.astype(np.int64), count - 1)
    return base + np.where(far < exact, far, large)
