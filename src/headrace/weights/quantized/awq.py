"""AWQ folders (Lin et al. 2023, https://arxiv.org/abs/2306.00978) in the layout `gemm`, as AutoAWQ and AutoRound write them.

Of a matrix [n, k]: w[i, j] = scales[g, i] * (q[i, j] - z[g, i]), g = j // group. The scales that AWQ searches are in the norms
and matrices before; nothing of it is left to do.

    qweight int32 [k, n / 8]    words along the outputs; field f of a word is output 8 * word + ORDER[f]
    qzeros  int32 [groups, n / 8]    the same
    scales  float16 [groups, n]
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.weights.kinds import KINDS
from headrace.weights.quantized.rows import BLOCK, by_turns, coded_rows, kind_of, unpacked
from headrace.weights.quantized.scheme import SCALES, QuantizedTensor, StoredTensors
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.source import TensorInfo, WeightError

FIELDS = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLACES = np.argsort(ORDER)  # of outputs 0..7 among a word's fields
BITS = 4


class Awq:
    """See the module. Raises WeightError, in one line, for layouts that are not read and for damaged files."""

    def __init__(self, folder: SafetensorsFolder, settings: Mapping[str, Any]) -> None:
        self._stored = StoredTensors(folder, "AWQ")
        layout = str(settings.get("version") or "gemm").lower()
        if layout != "gemm":
            raise WeightError(f"{folder.path}: is an AWQ folder of the layout {layout!r}; take one of gemm")
        self.matrices: dict[str, QuantizedTensor] = {}
        for matrix in self._stored.prefixes("qweight"):
            name, (n, k) = f"{matrix}.weight", self._measure(matrix)
            zeros = self._outputs(self._stored.array(matrix, "qzeros"))
            kind = kind_of(BITS, -int(zeros.max()), 15 - int(zeros.min()), k // len(zeros))
            info = TensorInfo(name, (n, k), kind, n * k // KINDS[kind].block * KINDS[kind].nbytes)
            self.matrices[name] = QuantizedTensor(info, tuple(f"{matrix}.{field}" for field in FIELDS))

    @property
    def summary(self) -> str:
        groups = {
            k // self._stored.info(name.removesuffix(".weight"), "scales").shape[0]
            for name, matrix in self.matrices.items()
            for k in matrix.info.shape[1:]
        }
        return f"AWQ, {BITS} bits, groups of {' and '.join(map(str, sorted(groups)))}"

    def rows(self, name: str) -> np.ndarray:
        """uint8 [n, row bytes]."""
        matrix, info = name.removesuffix(".weight"), self.matrices[name].info
        n, k = info.shape
        words, zeros = (self._stored.array(matrix, field) for field in ("qweight", "qzeros"))
        scales = self._stored.halves(matrix, "scales")
        group = np.arange(0, k, BLOCK) // (k // len(scales))  # of each block

        def make(first: int, last: int) -> np.ndarray:
            q = np.ascontiguousarray(self._outputs(words[:, first // 8 : last // 8]).T)
            z = self._outputs(zeros[:, first // 8 : last // 8])[group].T
            return coded_rows(info.kind, q, z, scales[group, first:last].T)

        return by_turns(n, make)

    def columns(self, name: str) -> None:
        """In order."""

    def _measure(self, matrix: str) -> tuple[int, int]:
        """[n, k] by the shapes, which must fit each other."""
        stored = self._stored
        shapes = [stored.info(matrix, field).shape for field in FIELDS]
        if any(len(shape) != 2 for shape in shapes):
            raise stored.error(matrix, "has tensors that are no matrices; the file is damaged")
        (k, packed), (groups, _), (_, n) = shapes
        if n != 8 * packed:
            raise stored.error(matrix, f"has {32 * packed // n} bits or is damaged; {BITS} are read: take another checkpoint")
        if k % groups or (k // groups) % BLOCK:
            raise stored.error(
                matrix, f"has {groups} groups of {k} columns; groups of a multiple of {BLOCK} are read: take another checkpoint"
            )
        stored.shape(matrix, "qweight", ("I32",), (k, packed))
        stored.shape(matrix, "qzeros", ("I32",), (groups, packed))
        stored.shape(matrix, "scales", SCALES, (groups, n))
        return n, k

    @staticmethod
    def _outputs(words: np.ndarray) -> np.ndarray:
        """Words [rows, n / 8] as uint8 [rows, n], outputs in order."""
        fields = unpacked(np.ascontiguousarray(words), BITS).reshape(len(words), -1, 8)
        return fields[:, :, PLACES].reshape(len(words), -1)
