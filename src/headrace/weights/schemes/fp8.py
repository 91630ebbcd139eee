"""FP8 folders as DeepSeek, Qwen and transformers (quant_method "fp8", "fbgemm_fp8") write them.

    weight float8 [n, k], weight_scale_inv float [n / 128, k / 128]    w = weight * weight_scale_inv of its block
    weight_scale [n, 1], [1] in place of it                           w = weight * weight_scale

Matrices are read as float32; the core holds them as bfloat16, or as int8 with `quantize`. Activation scales are ignored.

Floats of 8 bits with scales: E4M3 (without infinities) and E5M2 (arXiv 2209.05433), as torch and safetensors have them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes.base import SCALES, SchemeReader, StoredTensors

SCALE = ("weight_scale_inv", "weight_scale")
LEFT_OUT = ("input_scale", "activation_scale", "input_scale_ub")


class FP8Reader(SchemeReader):
    """Reads FP8 folders. Raises WeightError for damaged files."""

    def __init__(self, folder: SafetensorsFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, "FP8")
        self._scale: dict[str, str] = {}
        for field in SCALE:
            for matrix in self._stored.prefixes(field):
                weight = self._stored.info(matrix, "weight")
                shape = weight.shape if len(weight.shape) == 2 else (0, 0)
                self._stored.shape(matrix, "weight", KINDS, shape)
                check_scale(self._stored, matrix, field, *shape)
                self._scale[f"{matrix}.weight"] = field
                self._add(matrix, shape, "F32", ("weight", field, *LEFT_OUT))

    @property
    def summary(self) -> str:
        kinds = dict.fromkeys(
            self._stored.info(name.removesuffix(".weight"), "weight").kind.removeprefix("F8_") for name in self.matrices
        )
        return f"FP8, {' and '.join(kinds)} as bfloat16"

    def rows(self, name: str) -> np.ndarray:
        matrix, (n, k) = name.removesuffix(".weight"), self.matrices[name].info.shape
        values = VALUES[self._stored.info(matrix, "weight").kind][self._stored.array(matrix, "weight")]
        return (values * scales(self._stored, matrix, self._scale[name], n, k)).view(np.uint8)


def _values(exponent: int, bias: int, least_nan: int) -> np.ndarray:
    """All 256 codes as float32; codes from `least_nan` on (without the sign bit) are NaN."""
    codes = np.arange(256)
    fraction_bits = 7 - exponent
    power = codes >> fraction_bits & ((1 << exponent) - 1)
    fraction = (codes & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    size = np.where(power > 0, 1 + fraction, fraction) * 2.0 ** (np.maximum(power, 1) - bias)
    size[(codes & 127) >= least_nan] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


KINDS = ("F8_E4M3", "F8_E5M2")
VALUES = {"F8_E4M3": _values(4, 7, 0x7F), "F8_E5M2": _values(5, 15, 0x7C)}  # infinities are invalid, too


def check_scale(stored: StoredTensors, matrix: str, field: str, n: int, k: int) -> None:
    """Raise WeightError unless a field holds one scale, one for each row, or one for each block of a matrix [n, k]."""
    shape = stored.info(matrix, field).shape
    counts = zip(shape, (n, k), strict=len(shape) == 2)
    blocks = len(shape) == 2 and all(-(-size // _block(size, count)) == count for count, size in counts)
    stored.shape(matrix, field, SCALES, shape if shape in ((), (1,), (n,)) or blocks else (n, 1))


def scales(stored: StoredTensors, matrix: str, field: str, n: int, k: int) -> np.ndarray:
    """Scales as float32 that broadcasts to [n, k].

    Block sizes are the least powers of two of rows and columns that give the stored number of blocks.
    """
    stored_scales = stored.floats(matrix, field)
    if stored_scales.size == 1:
        return stored_scales.reshape(1, 1)
    if stored_scales.ndim == 1 or stored_scales.shape == (n, 1):
        return stored_scales.reshape(n, 1)
    rows, columns = (_block(size, count) for size, count in zip((n, k), stored_scales.shape, strict=True))
    return stored_scales.repeat(rows, 0)[:n].repeat(columns, 1)[:, :k]


def _block(size: int, count: int) -> int:
    block = 1
    while -(-size // block) > count:
        block *= 2
    return block
