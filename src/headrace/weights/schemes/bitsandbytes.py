"""Folders of bitsandbytes (LLM.int8(), Dettmers et al. 2022, arXiv 2208.07339; QLoRA, arXiv 2305.14314).

weight int8 [n, k], SCB float32 [n]    w = SCB / 127 * q (LLM.int8() keeps outlier inputs in 16 bits at run time; not stored)
weight uint8 [n * k / 2, 1]    codes of the table nf4 or fp4, the high half of a byte first, row by row
weight.absmax float32    one for each block of `blocksize` numbers; w = absmax * table[code]
weight.absmax uint8, weight.nested_absmax float32, weight.nested_quant_map float32 [256]    absmax quantized once more:
    absmax = nested_quant_map[absmax] * nested_absmax[block // nested_blocksize] + nested_offset
weight.quant_state.bitsandbytes__nf4 uint8    JSON: shape, blocksize, nested_blocksize, nested_offset
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes.base import SchemeReader
from headrace.weights.schemes.rows import BLOCK, integer_rows, table_rows

STATE = "weight.quant_state.bitsandbytes__"
TABLES = {"nf4": ("NF4", 123.26), "fp4": ("FP4", 96.0)}  # kind, what 1 is in its table
FOUR = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
EIGHT = ("weight", "SCB", "weight_format")
MAX_STATE = 1 << 16


class BitsAndBytesReader(SchemeReader):
    """Reads folders of bitsandbytes. Raises WeightError for damaged files."""

    def __init__(self, folder: SafetensorsFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, "bitsandbytes")
        self._states: dict[str, Mapping[str, Any]] = {}
        for matrix in self._stored.prefixes("SCB"):
            shape = self._stored.info(matrix, "weight").shape
            self._stored.shape(matrix, "weight", ("I8",), shape if len(shape) == 2 else (0, 0))
            self._stored.shape(matrix, "SCB", ("F32",), shape[:1])
            self._add(matrix, shape, "Q8_0", EIGHT)
        for kind in TABLES:
            for matrix in self._stored.prefixes(STATE + kind):
                shape = self._measure(matrix, kind)
                self._add(matrix, shape, TABLES[kind][0], (*FOUR, STATE + kind))

    @property
    def summary(self) -> str:
        kinds = dict.fromkeys(matrix.info.kind for matrix in self.matrices.values())
        return f"bitsandbytes, {' and '.join('int8' if kind == 'Q8_0' else kind for kind in kinds)}"

    def rows(self, name: str) -> np.ndarray:
        matrix, info = name.removesuffix(".weight"), self.matrices[name].info
        n, k = info.shape
        codes = self._stored.array(matrix, "weight")
        if info.kind == "Q8_0":
            scales = self._stored.as_halves(matrix, "SCB", self._stored.floats(matrix, "SCB") / np.float32(127))
            return integer_rows("Q8_0", codes, np.repeat(scales[:, None], k // BLOCK, 1))
        state = self._states[matrix]
        scales = self._largest(matrix, state) / np.float32(next(one for kind, one in TABLES.values() if kind == info.kind))
        each = np.repeat(self._stored.as_halves(matrix, "weight.absmax", scales), state["blocksize"] // BLOCK)
        packed = codes.reshape(n, k // 2)
        values = np.stack([packed >> 4, packed & 15], axis=2).reshape(n, k)
        return table_rows(values, each[: n * k // BLOCK].reshape(n, -1))

    def _add(self, matrix: str, shape: tuple[int, ...], kind: str, fields: Sequence[str], scale: float | None = None) -> None:
        if shape[-1] % BLOCK:
            raise self._stored.error(
                matrix, f"has rows of {shape[-1]} numbers, not a multiple of {BLOCK}; use the model's original safetensors"
            )
        super()._add(matrix, shape, kind, fields, scale)

    def _measure(self, matrix: str, kind: str) -> tuple[int, ...]:
        """Shape of a 4-bit matrix, by its quant_state, which must fit the tensors."""
        stored, info = self._stored, self._stored.info(matrix, STATE + kind)
        nested = stored.has(matrix, "weight.nested_absmax")
        try:
            if info.kind != "U8" or info.nbytes > MAX_STATE:
                raise ValueError
            state = json.loads(stored.array(matrix, STATE + kind).tobytes())
            shape, sizes = tuple(state["shape"]), [*state["shape"], state["blocksize"]]
            if nested:
                sizes.append(state["nested_blocksize"])
            finite = math.isfinite(state["nested_offset"] if nested else 0.0)
            if len(shape) != 2 or not finite or not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise stored.error(matrix, "has a quant_state that cannot be read; the file is damaged") from None
        count, size = math.prod(shape), state["blocksize"]
        if size % BLOCK or shape[1] % size:
            raise stored.error(
                matrix, f"has rows of {shape[1]} that its blocks of {size} do not divide; use the model's original safetensors"
            )
        stored.shape(matrix, "weight", ("U8",), (count // 2, 1))
        stored.shape(matrix, "weight.absmax", ("U8" if nested else "F32",), (count // size,))
        if nested:
            stored.shape(matrix, "weight.nested_quant_map", ("F32",), (256,))
            stored.shape(matrix, "weight.nested_absmax", ("F32",), (-(-(count // size) // state["nested_blocksize"]),))
        self._states[matrix] = state
        return shape

    def _largest(self, matrix: str, state: Mapping[str, Any]) -> np.ndarray:
        """absmax, float32 [blocks]."""
        stored = self._stored.array(matrix, "weight.absmax")
        if not self._stored.has(matrix, "weight.nested_absmax"):
            return stored.astype(np.float32)
        table, outer = (self._stored.array(matrix, f"weight.nested_{name}") for name in ("quant_map", "absmax"))
        each = outer[np.arange(stored.size) // state["nested_blocksize"]]
        absmax: np.ndarray = table[stored] * each + np.float32(state["nested_offset"])
        return absmax
