"""Stored tensors to numbers: through the native core, or through its numpy twin, which gives the very same bits."""

import numpy as np
import torch

from headrace import native
from headrace.weights.decode import dequantize_numpy
from headrace.weights.kinds import KINDS
from headrace.weights.source import WeightError, WeightSource

CHUNK = 1 << 20  # elements decoded at a time where something is needed beside the result

STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # read by copying


def read_tensor(source: WeightSource, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A stored tensor dequantised to `dtype` (rounded to nearest even from float32), a copy of its own. Raises WeightError."""
    info = source.info(name)
    return to_torch(source.raw(name), info.kind, info.shape, dtype)


def to_torch(raw: np.ndarray, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Stored rows `raw` (uint8 [rows, row_bytes]) as a new tensor of `shape`, rounded from float32 to `dtype`.

    Raises WeightError when `dtype` is not a floating type.
    """
    if not dtype.is_floating_point:
        raise WeightError(f"weights are read as floating numbers, not as {dtype}; use float32, bfloat16, float16 or float64")
    if STORED.get(kind) is dtype:
        return torch.from_numpy(raw.reshape(-1).copy()).view(dtype).view(shape)
    out = torch.empty(shape, dtype=dtype)
    flat, data = out.view(-1), raw.reshape(-1)
    block, block_bytes = KINDS[kind]
    if dtype is torch.float32:
        dequantize(data, kind, flat.numpy())
        return out
    scratch = np.empty(min(CHUNK, flat.numel()), np.float32)
    for start in range(0, flat.numel(), CHUNK):
        part = scratch[: min(CHUNK, flat.numel() - start)]
        begin = start // block * block_bytes
        dequantize(data[begin : begin + part.size // block * block_bytes], kind, part)
        flat[start : start + part.size] = torch.from_numpy(part)
    return out


def dequantize(data: np.ndarray, kind: str, out: np.ndarray | None = None) -> np.ndarray:
    """Whole blocks of `kind` (uint8 [bytes], contiguous) as float32 [elements], written to `out` where it is given."""
    block, block_bytes = KINDS[kind]
    if out is None:
        out = np.empty(data.size // block_bytes * block, np.float32)
    if native.available():
        native.core().dequantize(kind, data, out, torch.get_num_threads())
        return out
    step = CHUNK // block * block_bytes
    for start in range(0, data.size, step):
        done = start // block_bytes * block
        out[done : done + CHUNK] = dequantize_numpy(data[start : start + step], kind)
    return out
