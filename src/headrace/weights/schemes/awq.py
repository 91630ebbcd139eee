"""AWQ folders (Lin et al. 2023, arXiv 2306.00978) in the layout `gemm`, as AutoAWQ and AutoRound write them.

A matrix [n, k]: w[i, j] = scales[g, i] * (q[i, j] - z[g, i]), g = j // group. The activation scales that AWQ searches are
folded into earlier norms and matrices.

    qweight int32 [k, n / 8]         words along the outputs; field f of a word is output 8 * word + ORDER[f]
    qzeros  int32 [groups, n / 8]    the same
    scales  float16 [groups, n]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.weights.bits import pack_fields, unpack_fields
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes.base import SCALES, IntegerWriter, SchemeReader, Tensors, TensorSpec
from headrace.weights.schemes.rows import BLOCK, grouped_rows, kind_of, map_rows
from headrace.weights.source import WeightError

FIELDS = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLACES = np.argsort(ORDER)  # field of outputs 0..7 in a word
BITS = 4


class AWQReader(SchemeReader):
    """Reads AWQ folders. Raises WeightError for layouts that are not read, and for damaged files."""

    def __init__(self, folder: SafetensorsFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, "AWQ")
        layout = str(settings.get("version") or "gemm").lower()
        if layout != "gemm":
            raise WeightError(f"{folder.path}: the AWQ layout {layout!r} is not supported; use a checkpoint in gemm")
        for matrix in self._stored.prefixes("qweight"):
            n, k = self._measure(matrix)
            zeros = _unpack_outputs(self._stored.array(matrix, "qzeros"))
            self._add(matrix, (n, k), kind_of(BITS, -int(zeros.max()), 15 - int(zeros.min()), k // len(zeros)), FIELDS)

    @property
    def summary(self) -> str:
        groups = {
            k // self._stored.info(name.removesuffix(".weight"), "scales").shape[0]
            for name, matrix in self.matrices.items()
            for k in matrix.info.shape[1:]
        }
        return f"AWQ, {BITS} bits, groups of {' and '.join(map(str, sorted(groups)))}"

    def rows(self, name: str) -> np.ndarray:
        matrix, info = name.removesuffix(".weight"), self.matrices[name].info
        n, k = info.shape
        words, zeros = (self._stored.array(matrix, field) for field in ("qweight", "qzeros"))
        scales = self._stored.halves(matrix, "scales")
        group = np.arange(0, k, BLOCK) // (k // len(scales))  # of each block

        def decode(first: int, last: int) -> np.ndarray:
            q = np.ascontiguousarray(_unpack_outputs(words[:, first // 8 : last // 8]).T)
            z = _unpack_outputs(zeros[:, first // 8 : last // 8])[group].T
            return grouped_rows(info.kind, q, z, scales[group, first:last].T)

        return map_rows(n, decode)

    def _measure(self, matrix: str) -> tuple[int, int]:
        """[n, k] by the shapes, which must fit each other."""
        stored = self._stored
        (k, packed), (groups, _), (_, n) = stored.matrix_shapes(matrix, FIELDS)
        if n != 8 * packed:
            raise stored.error(
                matrix, f"has {32 * packed // n} bits or is damaged; {BITS} are supported: use another checkpoint"
            )
        stored.groups(matrix, groups, k)
        stored.shape(matrix, "qweight", ("I32",), (k, packed))
        stored.shape(matrix, "qzeros", ("I32",), (groups, packed))
        stored.shape(matrix, "scales", SCALES, (groups, n))
        return n, k


@dataclass(frozen=True, slots=True)
class AWQWriter(IntegerWriter):
    """Writes AWQ folders in the layout `gemm`: 4 bits, words along the outputs."""

    def fits(self, n: int, k: int) -> bool:
        return self.integers.fits(k) and n % 8 == 0

    def fields(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        groups = self.integers.groups(k)
        return tuple(map(TensorSpec, FIELDS, ("I32", "I32", "F16"), ((k, n // 8), (groups, n // 8), (groups, n))))

    def tensors(self, rows: np.ndarray, largest: float = 0.0) -> Tensors:
        _, codes, scales, zeros = self.split(rows)
        return dict(zip(FIELDS, (_pack_outputs(codes), _pack_outputs(zeros), scales.T), strict=True))

    def settings(self, whole: Sequence[str]) -> dict[str, Any]:
        of = self.integers
        settings = {"quant_method": "awq", "bits": 4, "group_size": of.group or -1, "version": "gemm"}
        settings |= {"zero_point": not of.symmetric}
        return settings | ({"modules_to_not_convert": list(whole)} if whole else {})


def _unpack_outputs(words: np.ndarray) -> np.ndarray:
    """Words [rows, n / 8] as codes uint8 [rows, n], outputs in order."""
    fields = unpack_fields(np.ascontiguousarray(words), BITS).reshape(len(words), -1, 8)
    return fields[:, :, PLACES].reshape(len(words), -1)


def _pack_outputs(codes: np.ndarray) -> np.ndarray:
    """Codes uint8 [n, columns] as words along the outputs, int32 [columns, n / 8]."""
    columns = np.ascontiguousarray(codes.T)
    return pack_fields(columns.reshape(len(columns), -1, 8)[:, :, ORDER].reshape(len(columns), -1), BITS)
