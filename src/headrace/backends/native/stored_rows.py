"""Stored hidden rows of the native back end, in numpy."""

import numpy as np

from headrace.runner.stored_rows import StoredRows

# Smallest length that a row is divided by.
SHORTEST = 1e-12


class NativeStoredRows(StoredRows):
    """Stored rows in float32."""

    def __init__(self, num_blocks: int, block_size: int, width: int) -> None:
        super().__init__(num_blocks, block_size, width, 4)

    def allocate(self) -> np.ndarray:
        return np.zeros(self.shape, np.float32)

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)

    def unit(self, rows: np.ndarray) -> np.ndarray:
        scaled: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), SHORTEST)
        return scaled

    def nearest(self, rows: np.ndarray, nodes: np.ndarray) -> list[float]:
        best: list[float] = (rows @ nodes.T).max(axis=0).tolist()
        return best
