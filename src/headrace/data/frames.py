"""Log-mel rows as numpy arrays. Apart from `sources`, which plans import: numpy takes long to import."""

import numpy as np

from headrace.data.sources import Frames


def frames_of(rows: np.ndarray) -> Frames:
    """The source of rows [2 * positions, bins]."""
    return Frames(rows.shape[1], np.ascontiguousarray(rows, "<f4").tobytes())


def rows_of(frames: Frames) -> np.ndarray:
    """The rows of a source, [2 * positions, bins] float32."""
    return np.frombuffer(frames.rows, "<f4").reshape(-1, frames.bins)
