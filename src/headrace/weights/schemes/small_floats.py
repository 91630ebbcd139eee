"""4-bit numbers E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) in the tensors of compressed-tensors.

MXFP4 has a power of two for each 32 numbers of a row, NVFP4 an E4M3 scale for each 16 and one float32 for the matrix.
That float32 is written as a power of two: then E2M1 * E4M3 * it has at most six bits of fraction, and bfloat16, in which the
core holds such matrices, is exact.
"""

from dataclasses import dataclass

import numpy as np

from headrace.weights.bits import pack_pairs, unpack_fields, unpack_halves
from headrace.weights.decode import MXFP4_VALUES
from headrace.weights.kinds import KINDS
from headrace.weights.schemes.base import Tensors, TensorSpec
from headrace.weights.schemes.fp8 import VALUES
from headrace.weights.schemes.rows import map_rows

MXFP4, NVFP4 = "mxfp4", "nvfp4"
GROUPS = {MXFP4: 32, NVFP4: 16}
E2M1 = MXFP4_VALUES / 2  # by code
LARGEST = E2M1[7:0:-1]  # values that the largest number of a group may have, from 6 down
E4M3 = VALUES["F8_E4M3"][:127]  # ascending, from 0


@dataclass(frozen=True, slots=True)
class SmallFloats:
    """MXFP4 or NVFP4, by `name`."""

    name: str

    @property
    def kind(self) -> str:
        """Of the rows: MXFP4; NVFP4 is numbers in float32, of which `nvfp4_parts` finds codes and scales."""
        return "MXFP4" if self.name == MXFP4 else "F32"

    def fits(self, n: int, k: int) -> bool:
        return k % GROUPS[self.name] == 0

    def fields(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        codes, groups = TensorSpec("weight_packed", "U8", (n, k // 2)), k // GROUPS[self.name]
        if self.name == MXFP4:
            return codes, TensorSpec("weight_scale", "U8", (n, groups))
        return codes, TensorSpec("weight_scale", "F8_E4M3", (n, groups)), TensorSpec("weight_global_scale", "F32", (1,))

    def tensors(self, rows: np.ndarray, largest: float = 0.0) -> Tensors:
        """Raises ValueError for numbers that are not those of the format."""
        if self.name == MXFP4:
            codes, scales = _mxfp4_parts(rows)
            return {"weight_packed": pack_pairs(codes), "weight_scale": scales}
        codes, scales, whole = nvfp4_parts(rows.view("<f4"))
        return {"weight_packed": pack_pairs(codes), "weight_scale": scales, "weight_global_scale": np.array([whole], "<f4")}


def read_nvfp4(packed: np.ndarray, scales: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """NVFP4 as float32 [n, k]. packed: uint8 [n, k / 2]; scales: codes of E4M3, uint8 [n, k / 16]; whole: float32 [1].

    Damaged scales give NaN or infinities, which the loader refuses.
    """
    codes = unpack_fields(np.ascontiguousarray(packed), 4)
    with np.errstate(all="ignore"):
        scale = VALUES["F8_E4M3"][scales] / whole
        values: np.ndarray = E2M1[codes].reshape(len(codes), -1, GROUPS[NVFP4]) * scale[:, :, None]
    return values.reshape(codes.shape)


def nvfp4_parts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Split NVFP4 numbers into codes uint8 [n, k], scale codes uint8 [n, k / 16], and the global scale, a power of two.

    values: float32 [n, k], each E2M1 * E4M3 (of its group) * a power of two. `read_nvfp4` restores them bit for bit.
    The largest number of a group may be any value of E2M1; each group takes the least scale that has a code.
    Raises ValueError if a group has none.
    """
    n = len(values)
    largest = map_rows(n, lambda first, last: _scales(values[first:last], None)).max()
    fraction, power = np.frexp(largest / E4M3[-1])
    # The least unit with which the largest scale has a code.
    unit = np.ldexp(np.float32(1), power - (fraction == 0.5))
    scales = map_rows(n, lambda first, last: _scales(values[first:last], unit))
    codes = map_rows(n, lambda first, last: _codes(values[first:last], scales[first:last]))
    return codes, np.searchsorted(E4M3, scales / unit).astype(np.uint8), 1 / unit


def _codes(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes of E2M1, uint8 [n, k], of numbers [n, k] with scales [n, k / 16]."""
    groups = values.reshape(*scales.shape, -1)
    codes = np.searchsorted(E2M1[:8], np.abs(groups) / scales[:, :, None]) + 8 * (groups < 0)
    return codes.astype(np.uint8).reshape(values.shape)


def _scales(values: np.ndarray, unit: np.float32 | None) -> np.ndarray:
    """Least scale of each group of numbers [n, k], float32 [n, k / 16]; with `unit` only scales that are E4M3 * unit.

    A scale has four bits of fraction and a number at most six, so that float32 quotients are exact if the scale fits.
    """
    sizes = np.abs(values).reshape(len(values), -1, GROUPS[NVFP4])
    top = sizes.max(2)
    least = np.where(top > 0, np.float32(np.nan), np.float32(0) if unit is None else unit)
    for size in LARGEST:
        scale = top / size
        bits = np.frexp(scale)[0] * 16
        fits = np.isnan(least) & (bits == np.floor(bits))
        if unit is not None:
            fits &= np.isin(scale, E4M3 * unit)
        over = sizes[fits] / scale[fits][:, None]
        fits[fits] = (E2M1[np.minimum(np.searchsorted(E2M1[:8], over), 7)] == over).all(1)
        least = np.where(fits, scale, least)
    if np.isnan(least).any():
        raise ValueError("has groups that are not 4-bit numbers times an E4M3 scale")
    return least


def _mxfp4_parts(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of MXFP4 as codes uint8 [n, k] and exponents uint8 [n, k / 32]."""
    blocks = rows.reshape(len(rows), -1, KINDS["MXFP4"].nbytes)
    return unpack_halves(blocks[:, :, 1:]).reshape(len(rows), -1), np.ascontiguousarray(blocks[:, :, 0])
