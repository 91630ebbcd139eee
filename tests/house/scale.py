"""An op: a value times a number."""

from collections.abc import Iterator

import torch

from headrace.ops.registry import Case


def scale_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    yield Case("a half", (torch.arange(12, dtype=dtype, device=device).view(3, 4), 0.5))


def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    """x [n, width] times `by`."""
    return x * by
