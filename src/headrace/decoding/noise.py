"""The sampling noise, where decoding methods look for it; `headrace.ops.noise` holds it and says what it is."""

from headrace.ops.noise import (
    Key,
    Purpose,
    gumbel,
    gumbel_at,
    key,
    philox,
    reference_gumbel,
    reference_gumbel_at,
    reference_philox,
)

__all__ = [
    "Key",
    "Purpose",
    "gumbel",
    "gumbel_at",
    "key",
    "philox",
    "reference_gumbel",
    "reference_gumbel_at",
    "reference_philox",
]
