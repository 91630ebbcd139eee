"""Folders of compressed-tensors (https://github.com/vllm-project/compressed-tensors), as llm-compressor writes them.

The tensors of a matrix [n, k] show how it is stored:

    weight_packed int32 [n, k * bits / 32]    integers + 2**(bits - 1), lowest field first; weight_shape int64 [2]: n and k.
        With 3, 5, 6 and 7 bits some files put whole integers only into each word (padded)
    weight_zero_point int32 [n * bits / 32, groups]    packed the same way along the outputs, or int8 [n, groups]; missing: 0
    weight int8 [n, k]    integers
    weight float8 [n, k]    numbers
    weight_packed uint8 [n, k / 2], weight_scale uint8 [n, k / 32]    MXFP4, the low half of a byte first
    the same, weight_scale float8 [n, k / 16], weight_global_scale float32 [1]    NVFP4, scale = weight_scale / global_scale
    compressed [n, k / 2], bitmask uint8 [n, k / 8]    2:4: the kept numbers of `weight`, and a bit for each kept place, lowest
        bit first. int8 stays sparse in the core; other numbers are written out with their zeros
    weight_scale [n, groups], [n, 1], [1], of float8 also [n / block, k / block]

w = weight_scale * (q - weight_zero_point). A static scale of int8 inputs (input_scale [1], no zero point) is kept. All other
activation scales are ignored: inputs are rounded as for every other model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.weights.bits import pack_fields, unpack_fields
from headrace.weights.decode import dequantize
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes import fp8
from headrace.weights.schemes.base import SCALES, IntegerWriter, SchemeReader, SchemeWriter, Tensors, TensorSpec
from headrace.weights.schemes.rows import BLOCK, MOST_ROW_COLUMNS, grouped_rows, integer_rows, kind_of, map_rows, mxfp4_rows
from headrace.weights.schemes.small_floats import GROUPS, MXFP4, NVFP4, SmallFloats, read_nvfp4
from headrace.weights.source import WeightError
from headrace.weights.sparse import indices_of, sparse_rows

LEFT_OUT = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "input_global_scale")
FIELDS = ("weight_packed", "weight", "compressed", "bitmask", "shape", "weight_shape", "weight_scale", "weight_zero_point")
GLOBAL = "weight_global_scale"
BITS = range(2, 9)
MARLIN = "marlin-24"  # 2:4 in the order of one GPU kernel
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
ACTIVATIONS = {  # input_activations of W8A8
    "token": INT8 | {"strategy": "token"},
    "tensor": INT8 | {"strategy": "tensor", "dynamic": False},
}


class CompressedTensorsReader(SchemeReader):
    """Reads folders of compressed-tensors. Raises WeightError for what is not read, and for damaged files."""

    def __init__(self, folder: SafetensorsFolder, settings: Mapping[str, Any]) -> None:
        if MARLIN in [one.get("format") for one in (settings, *_groups_of(settings))]:
            raise WeightError(
                f"{folder.path}: is in the layout of one kernel ({MARLIN}), which is not read; take the same model "
                "pack-quantized, or its 16 bits and headrace compress --sparsity 2:4"
            )
        super().__init__(folder, "compressed-tensors")
        self._widths = _widths(settings)
        self._bits: dict[str, int] = {}
        self._padded: set[str] = set()  # matrices whose words hold whole integers only
        self._summaries: dict[str, None] = {}
        for matrix in dict.fromkeys(self._stored.prefixes("weight_scale") + self._stored.prefixes("bitmask")):
            kind, shape, summary = self._measure(matrix)
            scale = self._input_scale(matrix)
            self._add(matrix, shape, kind, (*FIELDS, GLOBAL, *LEFT_OUT), scale)
            self._summaries[summary if scale is None else f"{summary}, one scale of inputs"] = None

    @property
    def summary(self) -> str:
        return f"compressed-tensors, {' and '.join(self._summaries)}"

    def rows(self, name: str) -> np.ndarray:
        matrix, info = name.removesuffix(".weight"), self.matrices[name].info
        n, k = info.shape
        if info.kind == "MXFP4":
            return mxfp4_rows(self._stored.array(matrix, "weight_packed"), self._stored.array(matrix, "weight_scale"))
        if info.kind == "F32" and matrix not in self._bits:
            return self._floats(matrix, n, k).view(np.uint8)
        scales = self._stored.halves(matrix, "weight_scale").reshape(-1, self._groups(matrix))
        group = np.arange(0, k, BLOCK) // (k // scales.shape[1])
        scales = np.broadcast_to(scales, (n, scales.shape[1]))
        zeros = self._zeros(matrix, n, scales.shape[1])

        def decode(first: int, last: int) -> np.ndarray:
            if info.kind == "S8":
                kept, chosen = self._chosen(matrix, first, last)
                return sparse_rows("S8", kept, indices_of(chosen), scales[first:last, group])
            q = self._integers(matrix, first, last, k)
            if zeros is None:
                return integer_rows(info.kind, q, scales[first:last, group])
            codes, points = (x.view(np.uint8) + np.uint8(128) for x in (q, zeros[first:last, group]))
            return grouped_rows(info.kind, codes, points, scales[first:last, group])

        return map_rows(n, decode)

    def _measure(self, matrix: str) -> tuple[str, tuple[int, int], str]:
        """Kind, shape and summary of a matrix, by the types and shapes of its tensors, which must fit each other."""
        stored = self._stored
        if stored.has(matrix, "weight_g_idx"):
            raise stored.error(matrix, "has weight_g_idx (act-order), which is not supported; use another checkpoint")
        if stored.has(matrix, "bitmask"):
            return self._measure_sparse(matrix)
        if not stored.has(matrix, "weight_packed"):
            info = stored.info(matrix, "weight")
            if len(info.shape) != 2:
                raise stored.error(matrix, "has a weight that is not a matrix; the file is damaged")
            return self._measure_plain(matrix, info.kind, info.shape)
        packed = stored.info(matrix, "weight_packed")
        if len(packed.shape) != 2:
            raise stored.error(matrix, "has a weight_packed that is not a matrix; the file is damaged")
        n, words = packed.shape
        if stored.has(matrix, GLOBAL):
            stored.shape(matrix, "weight_packed", ("U8",), (n, words))
            stored.shape(matrix, "weight_scale", ("F8_E4M3",), (n, 2 * words // GROUPS[NVFP4]))
            stored.shape(matrix, GLOBAL, ("F32",), (1,))
            if 2 * words % GROUPS[NVFP4]:
                raise stored.error(matrix, f"has rows of {2 * words} numbers, not a multiple of {GROUPS[NVFP4]}; it is damaged")
            return "F32", (n, 2 * words), "NVFP4 as bfloat16"
        if packed.kind == "U8":
            stored.shape(matrix, "weight_scale", ("U8",), (n, 2 * words // BLOCK))
            if words % (BLOCK // 2):
                raise stored.error(
                    matrix, f"has rows of {2 * words} numbers, not a multiple of {BLOCK}; use another checkpoint"
                )
            return "MXFP4", (n, 2 * words), "MXFP4"
        shape = stored.info(matrix, "weight_shape")
        stored.shape(matrix, "weight_shape", ("I64",), (2,))
        stored.shape(matrix, "weight_packed", ("I32",), packed.shape)
        rows, k = (int(size) for size in stored.array(matrix, shape.name.rpartition(".")[2]))
        widths = ((bits, padded) for padded in (False, True) for bits in self._widths)
        width = next((each for each in widths if words == _words(k, *each)), None)
        if rows != n or k < 1 or width is None:
            bits = " or ".join(map(str, self._widths))
            raise stored.error(matrix, f"has {n} x {words} words for {rows} x {k} numbers of {bits} bits; the file is damaged")
        self._bits[matrix] = width[0]
        if width[1]:
            self._padded.add(matrix)
        return self._integer_kind(matrix, width[0], n, k)

    def _measure_plain(self, matrix: str, kind: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, int], str]:
        n, k = shape
        if kind == "I8":
            self._bits[matrix] = 8
            return self._integer_kind(matrix, 8, n, k)
        if kind not in fp8.KINDS:
            raise self._stored.error(matrix, f"has numbers of {kind}, which are not supported; use another checkpoint")
        fp8.check_scale(self._stored, matrix, "weight_scale", n, k)
        return "F32", (n, k), f"{kind} as bfloat16"

    def _measure_sparse(self, matrix: str) -> tuple[str, tuple[int, int], str]:
        stored = self._stored
        column = stored.info(matrix, "shape").shape == (2, 1)
        stored.shape(matrix, "shape", ("I64",), (2, 1) if column else (2,))
        n, k = (int(size) for size in stored.array(matrix, "shape").reshape(-1))
        if n < 1 or k < 1 or k % 8:
            raise stored.error(matrix, f"is {n} x {k}, which cannot be 2:4; the file is damaged")
        kind = stored.info(matrix, "compressed").kind
        stored.shape(matrix, "compressed", (kind,), (n, k // 2))
        stored.shape(matrix, "bitmask", ("U8",), (n, k // 8))
        if stored.has(matrix, "weight_scale"):
            measured = self._measure_plain(matrix, kind, (n, k))
            if measured[0] in ("Q8_0", "C8"):
                return "S8", measured[1], f"2:4, {measured[2]}"
            if kind == "I8":
                raise stored.error(matrix, "is 2:4 with zero points, which is not supported; use a symmetric checkpoint")
        elif kind in SCALES:
            measured = "F32", (n, k), kind
        else:
            raise stored.error(matrix, f"has numbers of {kind}, which are not supported; use another checkpoint")
        return measured[0], measured[1], f"2:4 (zeros are written out), {measured[2]}"

    def _integer_kind(self, matrix: str, bits: int, n: int, k: int) -> tuple[str, tuple[int, int], str]:
        stored, groups = self._stored, self._groups(matrix)
        scale = stored.info(matrix, "weight_scale")
        rows = 1 if scale.shape in ((), (1,)) else n
        stored.shape(matrix, "weight_scale", SCALES, (n, groups) if rows == n else scale.shape)
        stored.groups(matrix, groups, k)
        zeros, half = self._zeros(matrix, n, groups), 1 << bits - 1
        low, high = (0, 0) if zeros is None else (int(zeros.min()), int(zeros.max()))
        kind = kind_of(bits, -half - high, half - 1 - low, k // groups)
        if kind == "Q8_0" and groups == 1 and k <= MOST_ROW_COLUMNS:
            kind = "C8"
        size = f"groups of {k // groups}" if groups > 1 else "a scale a row" if rows == n else "one scale"
        return kind, (n, k), f"{bits} bits, {size}"

    def _input_scale(self, matrix: str) -> float | None:
        """Static input scale of int8 weights; None if inputs are rounded token by token, or have a zero point."""
        stored = self._stored
        if self._bits.get(matrix) != 8 or not stored.has(matrix, "input_scale"):
            return None
        shape = stored.info(matrix, "input_scale").shape
        stored.shape(matrix, "input_scale", SCALES, shape if shape in ((), (1,)) else (1,))
        scale = float(stored.floats(matrix, "input_scale").reshape(-1)[0])
        if not 0 < scale < float("inf"):
            raise stored.error(matrix, f"has an input_scale of {scale}; the file is damaged")
        shifted = stored.has(matrix, "input_zero_point") and stored.array(matrix, "input_zero_point").any()
        return None if shifted else scale

    def _groups(self, matrix: str) -> int:
        shape = self._stored.info(matrix, "weight_scale").shape
        return shape[1] if len(shape) == 2 else 1

    def _zeros(self, matrix: str, n: int, groups: int) -> np.ndarray | None:
        """Zero points, int8 [n, groups]; None if all are 0."""
        if not self._stored.has(matrix, "weight_zero_point"):
            return None
        stored, bits = self._stored, self._bits[matrix]
        if stored.info(matrix, "weight_zero_point").kind == "I32":
            padded = matrix in self._padded
            stored.shape(matrix, "weight_zero_point", ("I32",), (_words(n, bits, padded), groups))
            words = np.ascontiguousarray(stored.array(matrix, "weight_zero_point").T)
            zeros = (unpack_fields(words, bits, padded)[:, :n].T - np.uint8(1 << bits - 1)).view(np.int8)
        else:
            shape = stored.info(matrix, "weight_zero_point").shape
            stored.shape(matrix, "weight_zero_point", ("I8",), shape if shape in ((), (1,)) else (n, groups))
            zeros = np.broadcast_to(stored.array(matrix, "weight_zero_point").reshape(-1, groups), (n, groups))
        return zeros if zeros.any() else None

    def _integers(self, matrix: str, first: int, last: int, k: int) -> np.ndarray:
        """Integers of some rows, int8 [last - first, k]."""
        if matrix in self._bits and self._stored.has(matrix, "weight_packed"):
            bits = self._bits[matrix]
            words = np.ascontiguousarray(self._stored.array(matrix, "weight_packed")[first:last])
            return (unpack_fields(words, bits, matrix in self._padded)[:, :k] - np.uint8(1 << bits - 1)).view(np.int8)
        return self._stored.array(matrix, "weight")[first:last].view(np.int8)

    def _floats(self, matrix: str, n: int, k: int) -> np.ndarray:
        if self._stored.has(matrix, GLOBAL):
            return read_nvfp4(*(self._stored.array(matrix, field) for field in ("weight_packed", "weight_scale", GLOBAL)))
        kept = self._kept(matrix, n)
        if not self._stored.has(matrix, "weight_scale"):
            return dequantize(kept.reshape(-1).view(np.uint8), self._stored.info(matrix, "compressed").kind).reshape(n, k)
        field = "compressed" if self._stored.has(matrix, "bitmask") else "weight"
        values = fp8.VALUES[self._stored.info(matrix, field).kind][kept]
        return values * fp8.scales(self._stored, matrix, "weight_scale", n, k)

    def _kept(self, matrix: str, n: int) -> np.ndarray:
        """The weight; of 2:4 with its zeros."""
        if not self._stored.has(matrix, "bitmask"):
            return self._stored.array(matrix, "weight")
        values, chosen = self._chosen(matrix, 0, n)
        dense = np.zeros(chosen.shape, values.dtype)
        dense[chosen] = values.reshape(-1)
        return dense

    def _chosen(self, matrix: str, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Numbers that 2:4 keeps [rows, k / 2], and their places: bool [rows, k]."""
        values, mask = (self._stored.array(matrix, name)[first:last] for name in ("compressed", "bitmask"))
        chosen = np.unpackbits(mask, axis=1, bitorder="little").astype(bool)
        if (chosen.reshape(last - first, -1, 4).sum(2) != 2).any():
            raise self._stored.error(matrix, "has a bitmask that does not keep two of four; the file is damaged")
        return values, chosen


def _groups_of(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _widths(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Widths that config.json names, or all that are read."""
    weights = [group.get("weights") for group in _groups_of(settings)]
    named = {one.get("num_bits") for one in weights if isinstance(one, dict)}
    return tuple(bits for bits in BITS if bits in named) or tuple(BITS)


def _words(count: int, bits: int, padded: bool) -> int:
    """32-bit words for `count` fields in a row."""
    return -(-count // (32 // bits)) if padded else -(-count * bits // 32)


def activations_of(settings: Mapping[str, Any]) -> str:
    """Rounding of inputs that a quantization_config asks for.

    "token": int8 with a scale for each token. "tensor": int8 with one static scale. "auto": not stated.
    """
    inputs = [group.get("input_activations") for group in _groups_of(settings)]
    stated = [one for one in inputs if isinstance(one, Mapping)]
    return next((name for name, what in ACTIVATIONS.items() if any(what.items() <= one.items() for one in stated)), "auto")


class GroupWriter(SchemeWriter, Protocol):
    """Writer of one of several formats that a folder of compressed-tensors may hold."""

    @property
    def form(self) -> str:
        """The format's name: "pack-quantized" and the like."""
        ...

    def scheme(self, targets: Sequence[str]) -> dict[str, Any]:
        """An entry of config_groups for modules, by class or by name."""
        ...


@dataclass(frozen=True, slots=True)
class CompressedTensorsWriter(IntegerWriter):
    """Writes pack-quantized folders, or int-quantized ones if activations are rounded."""

    def fields(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        of = self.integers
        groups = of.groups(k)
        scale = TensorSpec("weight_scale", "F16", (n, groups))
        if of.activations:
            static = (TensorSpec("input_scale", "F32", (1,)),) if of.static else ()
            return scale, TensorSpec("weight", "I8", (n, k)), *static
        fields = [TensorSpec("weight_shape", "I64", (2,)), TensorSpec("weight_packed", "I32", (n, k * of.bits // 32))]
        if not of.symmetric:
            fields.append(TensorSpec("weight_zero_point", "I32", (-(-n * of.bits // 32), groups)))
        return (*fields, scale)

    def tensors(self, rows: np.ndarray, largest: float = 0.0) -> Tensors:
        of = self.integers
        values, codes, scales, zeros = self.split(rows)
        if of.activations:
            static = {"input_scale": np.array([(largest or 1.0) / 127], "<f4")} if of.static else {}
            return {"weight_scale": scales, "weight": values, **static}
        fields = {"weight_shape": np.array(values.shape, "<i8"), "weight_packed": pack_fields(codes, of.bits)}
        if not of.symmetric:
            fields["weight_zero_point"] = pack_fields(np.ascontiguousarray(zeros.T), of.bits).T
        return {**fields, "weight_scale": scales}

    @property
    def form(self) -> str:
        return "int-quantized" if self.integers.activations else "pack-quantized"

    def scheme(self, targets: Sequence[str]) -> dict[str, Any]:
        of = self.integers
        group = {"strategy": "group", "group_size": of.group} if of.group else {"strategy": "channel"}
        weights = {"num_bits": of.bits, "type": "int", "symmetric": of.symmetric, "dynamic": False, **group}
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": not of.static}
        inputs |= {"strategy": "tensor" if of.static else "token"}
        return scheme_of(self.form, targets, weights, inputs if of.activations else None)

    def settings(self, whole: Sequence[str]) -> dict[str, Any]:
        return settings_of(self.form, [self.scheme(["Linear"])], ["lm_head", *whole])


@dataclass(frozen=True, slots=True)
class SmallFloatsWriter(SmallFloats):
    """Writes mxfp4-pack-quantized or nvfp4-pack-quantized folders."""

    @property
    def form(self) -> str:
        return f"{self.name}-pack-quantized"

    def scheme(self, targets: Sequence[str]) -> dict[str, Any]:
        weights: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
        weights |= {"strategy": "group" if self.name == MXFP4 else "tensor_group", "group_size": GROUPS[self.name]}
        return scheme_of(self.form, targets, weights, None)

    def settings(self, whole: Sequence[str]) -> dict[str, Any]:
        return settings_of(self.form, [self.scheme(["Linear"])], ["lm_head", *whole])


def scheme_of(form: str, targets: Sequence[str], weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """An entry of config_groups: its modules, and the formats of their weights and inputs."""
    settings = {"targets": list(targets), "weights": weights, "input_activations": inputs, "output_activations": None}
    return settings | {"format": form}


def mixed_settings(groups: Mapping[GroupWriter, Sequence[str]], whole: Sequence[str]) -> dict[str, Any]:
    """quantization_config of a folder with several formats. groups: the modules of each, by name.

    whole: modules that are not quantized, as lm_head is if no group names it.
    """
    forms = list(dict.fromkeys(one.form for one in groups))
    named = {name for names in groups.values() for name in names}
    ignored = [name for name in ("lm_head", *whole) if name not in named]
    schemes = [one.scheme(names) for one, names in groups.items()]
    return settings_of(forms[0] if len(forms) == 1 else "mixed-precision", schemes, ignored)


def settings_of(form: str, schemes: Sequence[dict[str, Any]], ignored: Sequence[str]) -> dict[str, Any]:
    """quantization_config of a folder of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": scheme for number, scheme in enumerate(schemes)},
        "ignore": list(ignored),
    }
