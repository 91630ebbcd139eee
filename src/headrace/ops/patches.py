"""Convolutions as linear layers: the neighbouring rows that each output row reads, side by side."""

import numpy as np


def patch_rows(count: int, taps: int, stride: int) -> np.ndarray:
    """Input rows of each output row of a convolution over `count` rows, [ceil(count / stride), taps] int64.

    taps is odd, and output i is centred on row i * stride. Rows beyond both ends are row `count`, which the caller appends as
    zeros.
    """
    rows = np.arange(0, count, stride)[:, None] + np.arange(taps) - taps // 2
    return np.where((rows >= 0) & (rows < count), rows, count)
