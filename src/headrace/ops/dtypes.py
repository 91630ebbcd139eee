"""Number formats of ops: the type of sums, and the tolerance of results."""

import torch

# How far a dtype may be from float64, relative to the largest value of the result.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type of sums: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32
