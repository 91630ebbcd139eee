"""Layouts that folders are written in: rows of a kind as the tensors that the readers beside this file take, and what
config.json says of them. A matrix is written by its integers alone, so that what is read again is what was rounded, bit for
bit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.weights.quantized import gptq, two_four
from headrace.weights.quantized.awq import ORDER
from headrace.weights.quantized.rows import BLOCK, integers_of, kind_of, packed
from headrace.weights.sparse import DENSE, from_dense

SIZES = {"F32": 4, "F16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}
Tensors = dict[str, np.ndarray]


class TensorSpec(NamedTuple):
    """A tensor of a matrix: "<matrix>.<name>"."""

    name: str
    type: str  # as safetensors names it
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * SIZES[self.type]


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers of 3 to 8 bits with a scale for `group` inputs of a row (0: for all of them), and with a zero point unless they
    are `symmetric`. `activations`: whoever runs the folder is told to round these to 8 bits, too, a token at a time (W8A8), or,
    where they are `static`, with the one scale that each matrix has for its inputs."""

    bits: int
    group: int = 0
    symmetric: bool = True
    activations: bool = False
    static: bool = False

    @property
    def range(self) -> tuple[int, int]:
        """The least and the largest integer, zero point taken off."""
        if not self.symmetric:
            return 1 - (1 << self.bits), (1 << self.bits) - 1
        half = 1 << self.bits - 1
        return (1 - half if self.bits == 8 else -half), half - 1

    @property
    def kind(self) -> str:
        """Of the rows."""
        return kind_of(self.bits, *self.range, self.group)

    def groups(self, k: int) -> int:
        return k // (self.group or k)

    def fits(self, k: int) -> bool:
        """Whether rows of k numbers are whole groups, and these whole blocks."""
        size = self.group or k
        return k % size == 0 and size % BLOCK == 0


class Layout(Protocol):
    """How a folder holds matrices."""

    @property
    def kind(self) -> str:
        """Of the rows that are to be written."""
        ...

    def fits(self, n: int, k: int) -> bool:
        """Whether it holds a matrix of this size."""
        ...

    def fields(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        """The tensors of a matrix."""
        ...

    def tensors(self, rows: np.ndarray, largest: float = 0.0) -> Tensors:
        """Their values, in that order, of uint8 [n, row bytes]. `largest`: of the inputs, in size, where it is known."""
        ...

    def settings(self, whole: Sequence[str]) -> dict[str, Any]:
        """quantization_config of a folder whose matrices `whole` are floats."""
        ...


class Grouped(Layout, Protocol):
    """A layout of compressed-tensors, of which a folder may hold several."""

    @property
    def form(self) -> str:
        """ "pack-quantized" and the like."""
        ...

    def scheme(self, targets: Sequence[str]) -> dict[str, Any]:
        """What is said of some modules: by class, or by name."""
        ...


@dataclass(frozen=True, slots=True)
class Compressed:
    """compressed-tensors: pack-quantized, or int-quantized where activations are rounded."""

    integers: Integers

    @property
    def kind(self) -> str:
        return self.integers.kind

    def fits(self, n: int, k: int) -> bool:
        return self.integers.fits(k)

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
        values, scales, zeros = _parts(of, rows)
        if of.activations:
            static = {"input_scale": np.array([(largest or 1.0) / 127], "<f4")} if of.static else {}
            return {"weight_scale": scales, "weight": values, **static}
        made = {"weight_shape": np.array(values.shape, "<i8"), "weight_packed": packed(_offset(values, zeros), of.bits)}
        if not of.symmetric:
            made["weight_zero_point"] = packed(np.ascontiguousarray(zeros.T), of.bits).T
        return {**made, "weight_scale": scales}

    @property
    def form(self) -> str:
        return "int-quantized" if self.integers.activations else "pack-quantized"

    def scheme(self, targets: Sequence[str]) -> dict[str, Any]:
        """What is said of some modules: by class, or by name."""
        of = self.integers
        group = {"strategy": "group", "group_size": of.group} if of.group else {"strategy": "channel"}
        weights = {"num_bits": of.bits, "type": "int", "symmetric": of.symmetric, "dynamic": False, **group}
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": not of.static}
        inputs |= {"strategy": "tensor" if of.static else "token"}
        return scheme_of(self.form, targets, weights, inputs if of.activations else None)

    def settings(self, whole: Sequence[str]) -> dict[str, Any]:
        return settings_of(self.form, [self.scheme(["Linear"])], ["lm_head", *whole])


def scheme_of(form: str, targets: Sequence[str], weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """A group of config_groups: the modules that it has, and what is said of their weights and inputs."""
    settings = {"targets": list(targets), "weights": weights, "input_activations": inputs, "output_activations": None}
    return settings | {"format": form}


def mixed(groups: Mapping[Grouped, Sequence[str]], whole: Sequence[str]) -> dict[str, Any]:
    """quantization_config of a folder of compressed-tensors in which each format has the modules that are named; `whole` are
    floats, and so is lm_head where it is not named."""
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


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ, version 2: zero points as they are, groups in order."""

    integers: Integers

    @property
    def kind(self) -> str:
        return self.integers.kind

    def fits(self, n: int, k: int) -> bool:
        return self.integers.fits(k) and n * self.integers.bits % 32 == 0

    def fields(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        bits, groups = self.integers.bits, self.integers.groups(k)
        shapes = ((k * bits // 32, n), (groups, n * bits // 32), (groups, n), (k,))
        types = ("I32", "I32", "F16", "I32")
        return tuple(TensorSpec(*field) for field in zip(gptq.FIELDS, types, shapes, strict=True))

    def tensors(self, rows: np.ndarray, largest: float = 0.0) -> Tensors:
        bits = self.integers.bits
        values, scales, zeros = _parts(self.integers, rows)
        k, groups = values.shape[1], zeros.shape[1]
        made = (
            packed(_offset(values, zeros), bits).T,
            packed(np.ascontiguousarray(zeros.T), bits),
            scales.T,
            (np.arange(k) // (k // groups)).astype("<i4"),
        )
        return dict(zip(gptq.FIELDS, made, strict=True))

    def settings(self, whole: Sequence[str]) -> dict[str, Any]:
        of = self.integers
        settings: dict[str, Any] = {"quant_method": "gptq", "bits": of.bits, "group_size": of.group or -1, "sym": of.symmetric}
        settings |= {"desc_act": False, "static_groups": True, "checkpoint_format": "gptq_v2", "lm_head": False}
        return settings | ({"dynamic": {f"-:^{name.replace('.', '[.]')}$": {} for name in whole}} if whole else {})


@dataclass(frozen=True, slots=True)
class Awq:
    """AWQ in the layout `gemm`: 4 bits, words along the outputs."""

    integers: Integers

    @property
    def kind(self) -> str:
        return self.integers.kind

    def fits(self, n: int, k: int) -> bool:
        return self.integers.fits(k) and n % 8 == 0

    def fields(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        groups = self.integers.groups(k)
        return (
            TensorSpec("qweight", "I32", (k, n // 8)),
            TensorSpec("qzeros", "I32", (groups, n // 8)),
            TensorSpec("scales", "F16", (groups, n)),
        )

    def tensors(self, rows: np.ndarray, largest: float = 0.0) -> Tensors:
        values, scales, zeros = _parts(self.integers, rows)
        codes = _offset(values, zeros)
        return {"qweight": _outputs(codes), "qzeros": _outputs(zeros), "scales": scales.T}

    def settings(self, whole: Sequence[str]) -> dict[str, Any]:
        of = self.integers
        settings = {"quant_method": "awq", "bits": 4, "group_size": of.group or -1, "version": "gemm"}
        settings |= {"zero_point": not of.symmetric}
        return settings | ({"modules_to_not_convert": list(whole)} if whole else {})


@dataclass(frozen=True, slots=True)
class TwoFour:
    """2:4: two of each four neighbours, and where they stand; `sparse` is S4 or S8."""

    sparse: str

    @property
    def kind(self) -> str:
        return DENSE[self.sparse]

    def fits(self, n: int, k: int) -> bool:
        return k % BLOCK == 0

    def fields(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        four = self.sparse == "S4"
        return (
            TensorSpec("weight_packed", "U8" if four else "I8", (n, k // 4 if four else k // 2)),
            TensorSpec("weight_index", "U8", (n, k // 8)),
            TensorSpec("weight_scale", "F16", (n, k // BLOCK)),
        )

    def tensors(self, rows: np.ndarray, largest: float = 0.0) -> Tensors:
        """Raises ValueError where more than two of four neighbours are not zero."""
        return two_four.stored_parts(self.sparse, from_dense(self.sparse, rows))

    def settings(self, whole: Sequence[str]) -> dict[str, Any]:
        return {"quant_method": two_four.METHOD, "bits": int(self.sparse[1:]), "group_size": BLOCK}


def _parts(of: Integers, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers less their zero points int8 [n, k], scales float16 [n, groups], zero points uint8 [n, groups].

    A zero point is the least with which no integer of its group is below 0: as good as any other that holds them all.
    Raises ValueError for rows that do not have these groups.
    """
    values, scales = integers_of(of.kind, rows)
    n, k = values.shape
    groups = of.groups(k)
    shared = scales.reshape(n, groups, -1)
    if (shared.view(np.uint16) != shared[:, :, :1].view(np.uint16)).any():
        raise ValueError(f"scales differ within a group of {k // groups}")
    if of.symmetric:
        zeros = np.full((n, groups), 1 << of.bits - 1, np.uint8)
    else:
        each = values.reshape(n, groups, -1)
        zeros = np.maximum(-each.min(2), 0).astype(np.uint8)
        if (each.max(2) + zeros.astype(np.int16) >= 1 << of.bits).any():
            raise ValueError(f"a group has integers that {of.bits} bits do not hold")
    return values, np.ascontiguousarray(shared[:, :, 0]), zeros


def _offset(values: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Integers with their zero points, uint8 [n, k]."""
    n, groups = zeros.shape
    made: np.ndarray = (values.view(np.uint8).reshape(n, groups, -1) + zeros[:, :, None]).reshape(n, -1)
    return made


def _outputs(fields: np.ndarray) -> np.ndarray:
    """uint8 [n, columns] as words along the outputs, int32 [columns, n / 8]."""
    columns = np.ascontiguousarray(fields.T)
    return packed(columns.reshape(len(columns), -1, 8)[:, :, ORDER].reshape(len(columns), -1), 4)
