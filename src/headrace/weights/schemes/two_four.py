"""Folders of `headrace compress` with 2:4 sparsity: of each four neighbours of a row two are stored, with their places.

    weight_packed uint8 [n, k / 4]    4 bits: integers + 8, two to a byte, the low half first
    weight_packed int8 [n, k / 2]     8 bits: integers
    weight_index uint8 [n, k / 8]     2-bit indices, as weights.sparse has them
    weight_scale float16 [n, k / 32]

w = weight_scale * weight_packed at the places of the indices, and 0 elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.weights.bits import pack_pairs, unpack_fields
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes.base import SchemeReader, Tensors, TensorSpec
from headrace.weights.schemes.rows import BLOCK, map_rows
from headrace.weights.sparse import DENSE, check_indices, from_dense, sparse_parts, sparse_rows

METHOD = "headrace-2:4"  # quant_method
FIELDS = ("weight_packed", "weight_index", "weight_scale")


class TwoFourReader(SchemeReader):
    """Reads 2:4 folders. Raises WeightError for damaged files."""

    def __init__(self, folder: SafetensorsFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, METHOD)
        for matrix in self._stored.prefixes("weight_index"):
            n, k, kind = self._measure(matrix)
            self._add(matrix, (n, k), kind, FIELDS)

    @property
    def summary(self) -> str:
        bits = sorted({matrix.info.kind[1:] for matrix in self.matrices.values()})
        return f"2:4, {' and '.join(bits)} bits, groups of {BLOCK}"

    def rows(self, name: str) -> np.ndarray:
        matrix, info = name.removesuffix(".weight"), self.matrices[name].info
        packed, indices, scales = (self._stored.array(matrix, field) for field in FIELDS)
        try:
            check_indices(indices)
        except ValueError as error:
            raise self._stored.error(matrix, f"is damaged: {error}") from None

        def decode(first: int, last: int) -> np.ndarray:
            kept = packed[first:last]
            if info.kind == "S4":
                kept = (unpack_fields(np.ascontiguousarray(kept), 4) - np.uint8(8)).view(np.int8)
            return sparse_rows(info.kind, kept, indices[first:last], scales[first:last])

        return map_rows(info.shape[0], decode)

    def _measure(self, matrix: str) -> tuple[int, int, str]:
        """Rows, columns and kind, by types and shapes, which must fit each other."""
        stored = self._stored
        shape = stored.info(matrix, "weight_index").shape
        if len(shape) != 2 or shape[1] % (BLOCK // 8):
            raise stored.error(matrix, "has indices that are not a matrix of full blocks; the file is damaged")
        n, k = shape[0], 8 * shape[1]
        kind = "S8" if stored.info(matrix, "weight_packed").kind == "I8" else "S4"
        for field in TwoFourWriter(kind).fields(n, k):
            stored.shape(matrix, field.name, (field.type,), field.shape)
        return n, k, kind


@dataclass(frozen=True, slots=True)
class TwoFourWriter:
    """Writes 2:4 folders. sparse: S4 or S8."""

    sparse: str

    @property
    def kind(self) -> str:
        return DENSE[self.sparse]

    def fits(self, n: int, k: int) -> bool:
        return k % BLOCK == 0

    def fields(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        four = self.sparse == "S4"
        shapes = ((n, k // 4 if four else k // 2), (n, k // 8), (n, k // BLOCK))
        return tuple(map(TensorSpec, FIELDS, ("U8" if four else "I8", "U8", "F16"), shapes))

    def tensors(self, rows: np.ndarray, largest: float = 0.0) -> Tensors:
        """Raises ValueError if more than two of four neighbours are not zero."""
        return stored_parts(self.sparse, from_dense(self.sparse, rows))

    def settings(self, whole: Sequence[str]) -> dict[str, Any]:
        return {"quant_method": METHOD, "bits": int(self.sparse[1:]), "group_size": BLOCK}


def stored_parts(kind: str, rows: np.ndarray) -> Tensors:
    """Rows of S4 or S8, uint8 [n, row bytes], as the fields of a folder."""
    kept, indices, scales = sparse_parts(kind, rows)
    if kind == "S4":
        kept = pack_pairs((kept + np.int8(8)).view(np.uint8))
    return dict(zip(FIELDS, (kept, indices, scales), strict=True))
