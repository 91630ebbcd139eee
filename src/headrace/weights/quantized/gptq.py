"""GPTQ folders (Frantar et al. 2022, https://arxiv.org/abs/2210.17323) as AutoGPTQ, GPTQModel and AutoRound write them.

Of a matrix [n, k] with groups of columns: w[i, j] = scales[g, i] * (q[i, j] - z[g, i]), g = g_idx[j].

    qweight int32 [k * bits / 32, n]    words along the inputs, lowest field first
    qzeros  int32 [groups, n * bits / 32]    words along the outputs; version 1 stores z - 1, taken of whole words
    scales  float16 [groups, n]
    g_idx   int32 [k]    where it is not j // group (act-order), the columns are taken by group, and `columns` says how
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.weights.kinds import KINDS
from headrace.weights.quantized.rows import BLOCK, by_turns, coded_rows, kind_of, unpacked
from headrace.weights.quantized.scheme import SCALES, QuantizedTensor, StoredTensors
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.source import TensorInfo, WeightError

FIELDS = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 3, 4, 8)
ONES = {bits: np.uint32(sum(1 << at for at in range(0, 32, bits))) for bits in (2, 4, 8)}  # 1 in each field of a word


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a matrix, by the shapes of its tensors."""

    n: int
    k: int
    bits: int
    groups: int

    @property
    def group(self) -> int:
        return self.k // self.groups


class Gptq:
    """See the module. Raises WeightError, in one line, for widths and layouts that are not read and for damaged files."""

    def __init__(self, folder: SafetensorsFolder, settings: Mapping[str, Any]) -> None:
        self._stored = StoredTensors(folder, "GPTQ")
        layout = "marlin" if settings.get("is_marlin_format") else str(settings.get("checkpoint_format") or "gptq")
        if layout not in ("gptq", "gptq_v2"):
            raise WeightError(f"{folder.path}: is a GPTQ folder of the layout {layout!r}; take one of gptq or gptq_v2")
        self._shifted = layout == "gptq"
        self._act_order = settings.get("desc_act") is True
        self._sizes: dict[str, Sizes] = {}
        self.matrices: dict[str, QuantizedTensor] = {}
        for matrix in self._stored.prefixes("qweight"):
            sizes = self._measure(matrix)
            kind = self._kind(matrix, sizes)
            nbytes = sizes.n * sizes.k // KINDS[kind].block * KINDS[kind].nbytes
            name = f"{matrix}.weight"
            self._sizes[name] = sizes
            fields = tuple(f"{matrix}.{field}" for field in FIELDS if self._stored.has(matrix, field))
            self.matrices[name] = QuantizedTensor(TensorInfo(name, (sizes.n, sizes.k), kind, nbytes), fields)

    @property
    def summary(self) -> str:
        return " and ".join(dict.fromkeys(self._summary(name) for name in self.matrices))

    def rows(self, name: str) -> np.ndarray:
        """uint8 [n, row bytes]."""
        matrix, sizes, kind = name.removesuffix(".weight"), self._sizes[name], self.matrices[name].info.kind
        words, columns = self._stored.array(matrix, "qweight"), self.columns(name)
        scales = self._stored.halves(matrix, "scales")
        zeros = self._zeros(matrix, sizes)
        group = np.arange(0, sizes.k, BLOCK) // sizes.group  # of each block

        def make(first: int, last: int) -> np.ndarray:
            q = unpacked(np.ascontiguousarray(words[:, first:last].T), sizes.bits)
            if columns is not None:
                q = q[:, columns]
            z = zeros[group, first:last].T.astype(np.uint8)
            return coded_rows(kind, np.ascontiguousarray(q), z, scales[group, first:last].T)

        return by_turns(sizes.n, make)

    def columns(self, name: str) -> np.ndarray | None:
        """The columns by group, as they came within one. Raises WeightError."""
        matrix, sizes = name.removesuffix(".weight"), self._sizes[name]
        if not self._stored.has(matrix, "g_idx"):
            return None
        groups = self._stored.array(matrix, "g_idx")
        in_order = np.arange(sizes.k) // sizes.group
        if np.array_equal(groups, in_order):
            return None
        order = np.argsort(groups, kind="stable").astype(np.int32)
        if not np.array_equal(groups[order], in_order):
            raise self._stored.error(matrix, f"has a g_idx that is none of groups of {sizes.group}; the file is damaged")
        return order

    def _measure(self, matrix: str) -> Sizes:
        """Sizes and width by the shapes, which must fit each other."""
        stored = self._stored
        shapes = [stored.info(matrix, field).shape for field in FIELDS[:3]]
        if any(len(shape) != 2 for shape in shapes):
            raise stored.error(matrix, "has tensors that are no matrices; the file is damaged")
        (words, n), (groups, packed), _ = shapes
        stored.shape(matrix, "scales", SCALES, (groups, n))
        bits = 32 * packed // n
        if bits not in BITS or 32 * packed != n * bits:
            raise stored.error(matrix, f"has {bits} bits; {', '.join(map(str, BITS))} are read: take another checkpoint")
        k = words * 32 // bits
        if k % groups or (k // groups) % BLOCK:
            raise stored.error(
                matrix, f"has {groups} groups of {k} columns; groups of a multiple of {BLOCK} are read: take another checkpoint"
            )
        stored.shape(matrix, "qweight", ("I32",), (words, n))
        stored.shape(matrix, "qzeros", ("I32",), (groups, packed))
        if stored.has(matrix, "g_idx"):
            stored.shape(matrix, "g_idx", ("I32",), (k,))
        elif self._act_order:
            raise stored.error(matrix, "has no g_idx, which desc_act needs; the file is incomplete, download it again")
        return Sizes(n, k, bits, groups)

    def _kind(self, matrix: str, sizes: Sizes) -> str:
        zeros, most = self._zeros(matrix, sizes), (1 << sizes.bits) - 1
        return kind_of(sizes.bits, -int(zeros.max()), most - int(zeros.min()), sizes.group)

    def _zeros(self, matrix: str, sizes: Sizes) -> np.ndarray:
        """int16 [groups, n]."""
        words = np.ascontiguousarray(self._stored.array(matrix, "qzeros").view("<u4"))
        if self._shifted and sizes.bits in ONES:
            words = words + ONES[sizes.bits]
        zeros = unpacked(words, sizes.bits).astype(np.int16)
        return zeros + 1 & 7 if self._shifted and sizes.bits == 3 else zeros  # fields of 3 bits cross words: one by one

    def _summary(self, name: str) -> str:
        sizes = self._sizes[name]
        groups = "a scale a row" if sizes.groups == 1 else f"groups of {sizes.group}"
        order = ", act-order" if self.columns(name) is not None else ""
        return f"GPTQ, {sizes.bits} bits, {groups}{order}"
