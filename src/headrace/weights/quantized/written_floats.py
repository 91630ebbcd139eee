"""Folders of numbers in 4 bits, E2M1 (0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives), as compressed-tensors has them, written:
MXFP4 with a power of two for each 32 of a row, NVFP4 with a scale of E4M3 for each 16 and a float32 of the matrix.

That float32 is always a power of two here: then E2M1 times E4M3 times it has at most six bits of fraction, and bfloat16, as
which the core holds such matrices, says the same number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.weights.kinds import KINDS
from headrace.weights.quantized.compressed import E2M1, NVFP4_GROUP
from headrace.weights.quantized.float8 import VALUES
from headrace.weights.quantized.rows import by_turns
from headrace.weights.quantized.written import Tensors, TensorSpec, scheme_of, settings_of

MXFP4, NVFP4 = "mxfp4", "nvfp4"
GROUPS = {MXFP4: 32, NVFP4: NVFP4_GROUP}
LARGEST = E2M1[7:0:-1]  # what a group's largest number may be, from 6 down
E4M3 = VALUES["F8_E4M3"][:127]  # ascending, from 0


@dataclass(frozen=True, slots=True)
class SmallFloats:
    """compressed-tensors: mxfp4-pack-quantized or nvfp4-pack-quantized, by `name`."""

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
            return {"weight_packed": _pairs(codes), "weight_scale": scales}
        codes, scales, whole = nvfp4_parts(rows.view("<f4"))
        return {"weight_packed": _pairs(codes), "weight_scale": scales, "weight_global_scale": np.array([whole], "<f4")}

    @property
    def form(self) -> str:
        return f"{self.name}-pack-quantized"

    def scheme(self, targets: Sequence[str]) -> dict[str, Any]:
        """What is said of some modules: by class, or by name."""
        weights: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
        weights |= {"strategy": "group" if self.name == MXFP4 else "tensor_group", "group_size": GROUPS[self.name]}
        return scheme_of(self.form, targets, weights, None)

    def settings(self, whole: Sequence[str]) -> dict[str, Any]:
        return settings_of(self.form, [self.scheme(["Linear"])], ["lm_head", *whole])


def nvfp4_parts(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Of numbers float32 [n, k], each E2M1 times its group's E4M3 times a power of two: codes uint8 [n, k], codes of the scales
    uint8 [n, k / 16], and one over the power of two. Whoever multiplies them again has the same numbers, bit for bit.

    A group's largest number may be any size of E2M1: of the scales that this allows, each group takes the least that there is
    a code for. Raises ValueError where a group has none.
    """
    n = len(values)
    largest = by_turns(n, lambda first, last: _scales(values[first:last], None)).max()
    fraction, power = np.frexp(largest / E4M3[-1])
    unit = np.ldexp(np.float32(1), power - (fraction == 0.5))  # the least with which the largest scale has a code
    scales = by_turns(n, lambda first, last: _scales(values[first:last], unit))
    codes = by_turns(n, lambda first, last: _codes(values[first:last], scales[first:last]))
    return codes, np.searchsorted(E4M3, scales / unit).astype(np.uint8), 1 / unit


def _codes(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 [n, k] of numbers [n, k] with scales [n, k / 16]."""
    groups = values.reshape(*scales.shape, -1)
    codes = np.searchsorted(E2M1[:8], np.abs(groups) / scales[:, :, None]) + 8 * (groups < 0)
    return codes.astype(np.uint8).reshape(values.shape)


def _scales(values: np.ndarray, unit: np.float32 | None) -> np.ndarray:
    """The least scale of each group of numbers [n, k], float32 [n, k / 16]; with a `unit`, of those that are E4M3 times it.

    A scale has four bits of fraction and a number six at the most, so that a quotient which does not come out even is not taken
    for one that does.
    """
    sizes = np.abs(values).reshape(len(values), -1, NVFP4_GROUP)
    top = sizes.max(2)
    found = np.where(top > 0, np.float32(np.nan), np.float32(0) if unit is None else unit)
    for size in LARGEST:
        scale = top / size
        bits = np.frexp(scale)[0] * 16
        fits = np.isnan(found) & (bits == np.floor(bits))
        if unit is not None:
            fits &= np.isin(scale, E4M3 * unit)
        over = sizes[fits] / scale[fits][:, None]
        fits[fits] = (E2M1[np.minimum(np.searchsorted(E2M1[:8], over), 7)] == over).all(1)
        found = np.where(fits, scale, found)
    if np.isnan(found).any():
        raise ValueError("holds groups that are no numbers of 4 bits times a scale of E4M3")
    return found


def _mxfp4_parts(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of MXFP4 as codes uint8 [n, k] and powers uint8 [n, k / 32]."""
    blocks = rows.reshape(len(rows), -1, KINDS["MXFP4"].nbytes)
    nibbles = blocks[:, :, 1:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    return codes.reshape(len(rows), -1), np.ascontiguousarray(blocks[:, :, 0])


def _pairs(codes: np.ndarray) -> np.ndarray:
    """Two neighbours a byte, the first in its low half."""
    made: np.ndarray = codes[:, ::2] | codes[:, 1::2] << 4
    return made
