"""Dequantization of stored tensors, by the native core or its numpy twin, which returns the same bits."""

import math
from typing import Any

import numpy as np

from headrace import core
from headrace.weights.decode import dequantize_numpy
from headrace.weights.kinds import KINDS
from headrace.weights.source import WeightError, WeightSource

CHUNK = 1 << 20  # elements decoded at a time if a scratch buffer is needed


def read_floats(source: WeightSource, name: str) -> np.ndarray:
    """A stored tensor as float32, a new array. Raises WeightError."""
    info = source.info(name)
    values = dequantize(source.raw(name).reshape(-1), info.kind).reshape(info.shape)
    columns = source.columns(name)
    return values if columns is None else values[:, np.argsort(columns)]


def check_finite(values: Any, dtype: Any, name: str, source: WeightSource) -> None:
    """Raise WeightError if a tensor (numpy or torch) holds NaN or infinities.

    The tensor is first summed in `dtype`. That sum may overflow by itself, so only then every value is checked.
    """
    with np.errstate(all="ignore"):
        if math.isfinite(float(values.sum(dtype=dtype))):
            return
        bad = int((values * 0 != 0).sum())
    if bad:
        kind = str(values.dtype).removeprefix("torch.")
        raise WeightError(
            f"{source.path}: tensor {name!r} has {bad} values that are NaN or infinite in {kind}; "
            "the file is damaged, or needs a wider dtype (float32)"
        )


def dequantize(data: np.ndarray, kind: str, out: np.ndarray | None = None) -> np.ndarray:
    """Whole blocks of `kind`, uint8 [bytes] contiguous, as float32 [elements], written to `out` if given."""
    block, block_bytes = KINDS[kind]
    if out is None:
        out = np.empty(data.size // block_bytes * block, np.float32)
    if core.available():
        core.module().dequantize(kind, data, out, core.module().cpu_info()["threads"])
        return out
    step = CHUNK // block * block_bytes
    for start in range(0, data.size, step):
        done = start // block_bytes * block
        out[done : done + CHUNK] = dequantize_numpy(data[start : start + step], kind)
    return out
