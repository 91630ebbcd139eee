"""FP8 folders as DeepSeek, Qwen and transformers (quant_method "fp8", "fbgemm_fp8") write them.

    weight float8 [n, k], weight_scale_inv float [n / 128, k / 128]    w = weight * weight_scale_inv of its block
    weight_scale [n, 1], [1] in place of it                           w = weight * weight_scale

Matrices are read as float32; the core holds them as bfloat16, or as int8 with `quantize`. Activation scales are ignored.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes import float8
from headrace.weights.schemes.base import SchemeReader

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
                self._stored.shape(matrix, "weight", float8.KINDS, shape)
                float8.check_scale(self._stored, matrix, field, *shape)
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
        values = float8.VALUES[self._stored.info(matrix, "weight").kind][self._stored.array(matrix, "weight")]
        return (values * float8.scales(self._stored, matrix, self._scale[name], n, k)).view(np.uint8)
