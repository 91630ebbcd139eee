"""GPTQ folders (Frantar et al. 2022, arXiv 2210.17323) as AutoGPTQ, GPTQModel and AutoRound write them.

A matrix [n, k] with groups of columns: w[i, j] = scales[g, i] * (q[i, j] - z[g, i]), g = g_idx[j].

    qweight int32 [k * bits / 32, n]         words along the inputs, lowest field first
    qzeros  int32 [groups, n * bits / 32]    words along the outputs; version 1 stores z - 1, subtracted from whole words
    scales  float16 [groups, n]
    g_idx   int32 [k]    if it is not j // group (act-order), columns are read sorted by group; see `columns`

Written is version 2, with groups in order.
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

FIELDS = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 3, 4, 8)
ONES = {bits: np.uint32(sum(1 << at for at in range(0, 32, bits))) for bits in (2, 4, 8)}  # 1 in each field of a word


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a matrix, by the shapes of its tensors."""

    n: int
    k: int
    bits: int
    groups: int

    @property
    def group(self) -> int:
        return self.k // self.groups


class GPTQReader(SchemeReader):
    """Reads GPTQ folders. Raises WeightError for widths and layouts that are not read, and for damaged files."""

    def __init__(self, folder: SafetensorsFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, "GPTQ")
        layout = "marlin" if settings.get("is_marlin_format") else str(settings.get("checkpoint_format") or "gptq")
        if layout not in ("gptq", "gptq_v2"):
            raise WeightError(
                f"{folder.path}: the GPTQ layout {layout!r} is not supported; use a checkpoint in gptq or gptq_v2"
            )
        self._shifted = layout == "gptq"
        self._act_order = settings.get("desc_act") is True
        self._sizes: dict[str, Sizes] = {}
        for matrix in self._stored.prefixes("qweight"):
            sizes = self._sizes[f"{matrix}.weight"] = self._measure(matrix)
            self._add(matrix, (sizes.n, sizes.k), self._kind(matrix, sizes), FIELDS)

    @property
    def summary(self) -> str:
        return " and ".join(dict.fromkeys(self._summary(name) for name in self.matrices))

    def rows(self, name: str) -> np.ndarray:
        matrix, sizes, kind = name.removesuffix(".weight"), self._sizes[name], self.matrices[name].info.kind
        words, columns = self._stored.array(matrix, "qweight"), self.columns(name)
        scales = self._stored.halves(matrix, "scales")
        zeros = self._zeros(matrix, sizes)
        group = np.arange(0, sizes.k, BLOCK) // sizes.group  # of each block

        def decode(first: int, last: int) -> np.ndarray:
            q = unpack_fields(np.ascontiguousarray(words[:, first:last].T), sizes.bits)
            if columns is not None:
                q = q[:, columns]
            z = zeros[group, first:last].T.astype(np.uint8)
            return grouped_rows(kind, np.ascontiguousarray(q), z, scales[group, first:last].T)

        return map_rows(sizes.n, decode)

    def columns(self, name: str) -> np.ndarray | None:
        """int32 [k]: columns sorted by group, in order within a group; None if they are sorted already. Raises WeightError."""
        matrix, sizes = name.removesuffix(".weight"), self._sizes[name]
        if not self._stored.has(matrix, "g_idx"):
            return None
        groups = self._stored.array(matrix, "g_idx")
        in_order = np.arange(sizes.k) // sizes.group
        if np.array_equal(groups, in_order):
            return None
        order = np.argsort(groups, kind="stable").astype(np.int32)
        if not np.array_equal(groups[order], in_order):
            raise self._stored.error(matrix, f"has a g_idx that does not form groups of {sizes.group}; the file is damaged")
        return order

    def _measure(self, matrix: str) -> Sizes:
        """Sizes and width by the shapes, which must fit each other."""
        stored = self._stored
        (words, n), (groups, packed), _ = stored.matrix_shapes(matrix, FIELDS[:3])
        stored.shape(matrix, "scales", SCALES, (groups, n))
        bits = 32 * packed // n
        if bits not in BITS or 32 * packed != n * bits:
            raise stored.error(matrix, f"has {bits} bits; {', '.join(map(str, BITS))} are supported: use another checkpoint")
        k = words * 32 // bits
        stored.groups(matrix, groups, k)
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
        """Zero points, int16 [groups, n]."""
        words = np.ascontiguousarray(self._stored.array(matrix, "qzeros").view("<u4"))
        if self._shifted and sizes.bits in ONES:
            words = words + ONES[sizes.bits]
        zeros = unpack_fields(words, sizes.bits).astype(np.int16)
        # Fields of 3 bits cross words, so each has been shifted by itself.
        return zeros + 1 & 7 if self._shifted and sizes.bits == 3 else zeros

    def _summary(self, name: str) -> str:
        sizes = self._sizes[name]
        groups = "a scale a row" if sizes.groups == 1 else f"groups of {sizes.group}"
        order = ", act-order" if self.columns(name) is not None else ""
        return f"GPTQ, {sizes.bits} bits, {groups}{order}"


@dataclass(frozen=True, slots=True)
class GPTQWriter(IntegerWriter):
    """Writes GPTQ folders of version 2: zero points unchanged, groups in order."""

    def fits(self, n: int, k: int) -> bool:
        return self.integers.fits(k) and n * self.integers.bits % 32 == 0

    def fields(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        bits, groups = self.integers.bits, self.integers.groups(k)
        shapes = ((k * bits // 32, n), (groups, n * bits // 32), (groups, n), (k,))
        return tuple(map(TensorSpec, FIELDS, ("I32", "I32", "F16", "I32"), shapes))

    def tensors(self, rows: np.ndarray, largest: float = 0.0) -> Tensors:
        bits = self.integers.bits
        values, codes, scales, zeros = self.split(rows)
        k, groups = values.shape[1], zeros.shape[1]
        arrays = (
            pack_fields(codes, bits).T,
            pack_fields(np.ascontiguousarray(zeros.T), bits),
            scales.T,
            (np.arange(k) // (k // groups)).astype("<i4"),
        )
        return dict(zip(FIELDS, arrays, strict=True))

    def settings(self, whole: Sequence[str]) -> dict[str, Any]:
        of = self.integers
        settings: dict[str, Any] = {"quant_method": "gptq", "bits": of.bits, "group_size": of.group or -1, "sym": of.symmetric}
        settings |= {"desc_act": False, "static_groups": True, "checkpoint_format": "gptq_v2", "lm_head": False}
        return settings | ({"dynamic": {f"-:^{name.replace('.', '[.]')}$": {} for name in whole}} if whole else {})
