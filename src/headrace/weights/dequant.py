"""Stored blocks to numbers."""

import numpy as np
import torch

from headrace.weights.kinds import KINDS


def to_torch(raw: np.ndarray, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The stored rows `raw` (uint8 [rows, row_bytes]) as a tensor of `shape` and `dtype`."""
    raise NotImplementedError(kind, KINDS)
