"""Folders of `headrace compress` with 2:4: of each four neighbours of a row two are stored, and where they stand.

    weight_packed uint8 [n, k / 4]    of 4 bits: integers + 8, two to a byte, the low half first
    weight_packed int8 [n, k / 2]     of 8 bits: integers
    weight_index uint8 [n, k / 8]     2-bit indices, as weights.sparse has them
    weight_scale float16 [n, k / 32]

w = weight_scale * weight_packed where an index says so, and 0 elsewhere.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.weights.kinds import KINDS
from headrace.weights.quantized.rows import BLOCK, by_turns, unpacked
from headrace.weights.quantized.scheme import QuantizedTensor, StoredTensors
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.source import TensorInfo
from headrace.weights.sparse import check_indices, sparse_parts, sparse_rows

METHOD = "headrace-2:4"  # quant_method
FIELDS = ("weight_packed", "weight_index", "weight_scale")


def stored_parts(kind: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of S4 or S8 as the fields of a folder."""
    kept, indices, scales = sparse_parts(kind, rows)
    if kind == "S4":
        offset = (kept + np.int8(8)).view(np.uint8)
        kept = offset[:, ::2] | offset[:, 1::2] << 4
    return dict(zip(FIELDS, (kept, indices, scales), strict=True))


class TwoFour:
    """See the module. Raises WeightError, in one line, for damaged files."""

    def __init__(self, folder: SafetensorsFolder, settings: Mapping[str, Any]) -> None:
        self._stored = StoredTensors(folder, METHOD)
        self.matrices: dict[str, QuantizedTensor] = {}
        for matrix in self._stored.prefixes("weight_index"):
            n, k, kind = self._measure(matrix)
            block, nbytes = KINDS[kind]
            info = TensorInfo(f"{matrix}.weight", (n, k), kind, n * k // block * nbytes)
            self.matrices[info.name] = QuantizedTensor(info, tuple(f"{matrix}.{field}" for field in FIELDS))

    @property
    def summary(self) -> str:
        bits = sorted({coded.info.kind[1:] for coded in self.matrices.values()})
        return f"2:4, {' and '.join(bits)} bits, groups of {BLOCK}"

    def rows(self, name: str) -> np.ndarray:
        """uint8 [n, row bytes]. Raises WeightError where indices are none."""
        matrix, info = name.removesuffix(".weight"), self.matrices[name].info
        packed, indices, scales = (self._stored.array(matrix, field) for field in FIELDS)
        try:
            check_indices(indices)
        except ValueError as error:
            raise self._stored.error(matrix, f"is damaged: {error}") from None

        def make(first: int, last: int) -> np.ndarray:
            kept = packed[first:last]
            if info.kind == "S4":
                kept = (unpacked(np.ascontiguousarray(kept), 4) - np.uint8(8)).view(np.int8)
            return sparse_rows(info.kind, kept, indices[first:last], scales[first:last])

        return by_turns(info.shape[0], make)

    def columns(self, name: str) -> None:
        """In order."""

    def _measure(self, matrix: str) -> tuple[int, int, str]:
        """Rows, columns and kind, by types and shapes, which must fit each other."""
        stored = self._stored
        shape = stored.info(matrix, "weight_index").shape
        if len(shape) != 2 or shape[1] % (BLOCK // 8):
            raise stored.error(matrix, "has indices that are no matrix of whole blocks; the file is damaged")
        n, k = shape[0], 8 * shape[1]
        kind = "S8" if stored.info(matrix, "weight_packed").kind == "I8" else "S4"
        stored.shape(matrix, "weight_index", ("U8",), shape)
        stored.shape(matrix, "weight_scale", ("F16",), (n, k // BLOCK))
        stored.shape(matrix, "weight_packed", ("I8",) if kind == "S8" else ("U8",), (n, k // (2 if kind == "S8" else 4)))
        return n, k, kind
