"""What number formats mean for ops: the type that sums are formed in, and how near a result must come."""

import torch

# How far a dtype may be from float64, relative to the largest value of the result.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type sums are formed in: float64 stays, everything else is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
