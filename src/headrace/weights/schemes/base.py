"""Schemes of quantized weights in safetensors folders. One module each holds the reader and the writer of a scheme.

A reader decodes stored tensors into rows of a kind (weights.kinds); a writer turns such rows into tensors of the scheme.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.weights.decode import read_floats
from headrace.weights.kinds import KINDS
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes.rows import BLOCK, kind_of, row_integers
from headrace.weights.source import TensorInfo, WeightError

SCALES = ("F16", "BF16", "F32")  # types of stored scales
SIZES = {"F32": 4, "F16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}  # bytes, of the types written
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """Header of one quantized matrix: shape and kind after decoding, and the names of the stored tensors it is decoded from.

    input_scale: the one scale with which inputs are rounded to int8 (static W8A8).
    """

    info: TensorInfo
    stored: tuple[str, ...]
    input_scale: float | None = None


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors of a folder by matrix and field: "<matrix>.<field>". scheme: its name in messages."""

    folder: SafetensorsFolder
    scheme: str

    def prefixes(self, field: str) -> list[str]:
        """The matrices that have a field."""
        ending = f".{field}"
        return [name.removesuffix(ending) for name in self.folder.names() if name.endswith(ending)]

    def has(self, matrix: str, field: str) -> bool:
        return f"{matrix}.{field}" in self.folder.infos

    def info(self, matrix: str, field: str) -> TensorInfo:
        """Raises WeightError if the matrix lacks the field."""
        if not self.has(matrix, field):
            raise self.error(matrix, f"has no {field}; the file is incomplete, download it again")
        return self.folder.info(f"{matrix}.{field}")

    def matrix_shapes(self, matrix: str, fields: Sequence[str]) -> list[tuple[int, ...]]:
        """Shapes of fields. Raises WeightError if one is not a matrix."""
        shapes = [self.info(matrix, field).shape for field in fields]
        if any(len(shape) != 2 for shape in shapes):
            raise self.error(matrix, "has tensors that are not matrices; the file is damaged")
        return shapes

    def shape(self, matrix: str, field: str, kinds: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Raise WeightError unless the field has one of these types and this shape."""
        info = self.info(matrix, field)
        if info.kind not in kinds or info.shape != shape:
            sizes = [" x ".join(map(str, one)) or "a number" for one in (info.shape, shape)]
            raise self.error(
                matrix, f"has {field} of {info.kind} {sizes[0]} and needs {kinds[0]} {sizes[1]}; the file is damaged"
            )

    def groups(self, matrix: str, groups: int, k: int) -> None:
        """Raise WeightError unless k columns are `groups` groups of whole blocks of 32."""
        if groups < 1 or k % groups or (k // groups) % BLOCK:
            raise self.error(
                matrix, f"has {groups} groups of {k} columns; group sizes must be multiples of {BLOCK}: use another checkpoint"
            )

    def array(self, matrix: str, field: str) -> np.ndarray:
        return self.folder.array(f"{matrix}.{field}")

    def floats(self, matrix: str, field: str) -> np.ndarray:
        """A field of F16, BF16 or F32 as float32."""
        return read_floats(self.folder, f"{matrix}.{field}")

    def halves(self, matrix: str, field: str) -> np.ndarray:
        """A field of scales as float16. Raises WeightError as `as_halves` does."""
        return self.as_halves(matrix, field, self.floats(matrix, field))

    def as_halves(self, matrix: str, field: str, scales: np.ndarray) -> np.ndarray:
        """float32 scales of a field as float16; NaN and infinities stay.

        Raises WeightError if one changes by more than 2**-11 of itself.
        """
        with np.errstate(all="ignore"):
            halves = scales.astype(np.float16)
            apart = np.abs(halves.astype(np.float32) - scales)
        if (apart[np.isfinite(scales)] > np.abs(scales[np.isfinite(scales)]) * 2.0**-11).any():
            raise self.error(matrix, f"has a {field} too large or too small for 16 bits; use the model's original safetensors")
        return halves

    def error(self, matrix: str, what: str) -> WeightError:
        return WeightError(f"{self.folder.path}: {self.scheme} matrix {matrix!r} {what}")


class SchemeReader(ABC):
    """Reader of the quantized matrices of one folder.

    matrices: by name ("model.layers.0.mlp.up_proj.weight"). label: the scheme's name in messages.
    """

    def __init__(self, folder: SafetensorsFolder, label: str) -> None:
        self._stored = StoredTensors(folder, label)
        self.matrices: dict[str, QuantizedTensor] = {}

    @property
    @abstractmethod
    def summary(self) -> str:
        """The scheme and its settings for the user: "GPTQ, 4 bits, groups of 128"."""

    @abstractmethod
    def rows(self, name: str) -> np.ndarray:
        """A matrix as rows of its kind: uint8 [rows, row bytes], a new array. Raises WeightError."""

    def columns(self, name: str) -> np.ndarray | None:
        """Order of a matrix's columns, as `WeightSource.columns`."""
        return None

    def _add(self, matrix: str, shape: tuple[int, ...], kind: str, fields: Sequence[str], scale: float | None = None) -> None:
        """Register a matrix that is read as rows of `kind`; `fields` that it lacks are left out."""
        block, nbytes = KINDS[kind]
        info = TensorInfo(f"{matrix}.weight", shape, kind, prod(shape) // block * nbytes)
        stored = tuple(f"{matrix}.{field}" for field in fields if self._stored.has(matrix, field))
        self.matrices[info.name] = QuantizedTensor(info, stored, scale)


class TensorSpec(NamedTuple):
    """A stored tensor "<matrix>.<name>"; type as safetensors names it."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * SIZES[self.type]


class SchemeWriter(Protocol):
    """Writer of matrices in one format of a scheme."""

    @property
    def kind(self) -> str:
        """Kind of the rows that `tensors` takes."""
        ...

    def fits(self, n: int, k: int) -> bool:
        """True if the format can hold a matrix of this shape."""
        ...

    def fields(self, n: int, k: int) -> tuple[TensorSpec, ...]:
        """The stored tensors of a matrix [n, k]."""
        ...

    def tensors(self, rows: np.ndarray, largest: float = 0.0) -> Tensors:
        """Values of `fields`, in that order, for rows uint8 [n, row bytes].

        largest: largest absolute value of the matrix's inputs, for a static scale; 0 if unknown.
        Raises ValueError for rows that the format cannot hold.
        """
        ...

    def settings(self, whole: Sequence[str]) -> dict[str, Any]:
        """quantization_config for the config.json of a folder. whole: names of the modules that are not quantized."""
        ...


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """Integers of 3 to 8 bits with one scale for `group` inputs of a row (0: all of them), and a zero point unless symmetric.

    activations: inputs are to be rounded to 8 bits, too (W8A8), with one scale a token, or one for all if static.
    """

    bits: int
    group: int = 0
    symmetric: bool = True
    activations: bool = False
    static: bool = False

    @property
    def range(self) -> tuple[int, int]:
        """Least and largest integer after its zero point is subtracted."""
        if not self.symmetric:
            return 1 - (1 << self.bits), (1 << self.bits) - 1
        half = 1 << self.bits - 1
        return (1 - half if self.bits == 8 else -half), half - 1

    @property
    def kind(self) -> str:
        """Kind of the rows (schemes.rows)."""
        return kind_of(self.bits, *self.range, self.group)

    def groups(self, k: int) -> int:
        return k // (self.group or k)

    def fits(self, k: int) -> bool:
        """True if rows of k numbers are whole groups, and groups whole blocks of 32."""
        size = self.group or k
        return k % size == 0 and size % BLOCK == 0


@dataclass(frozen=True, slots=True)
class IntegerWriter:
    """Base of the writers of integers."""

    integers: IntegerFormat

    @property
    def kind(self) -> str:
        return self.integers.kind

    def fits(self, n: int, k: int) -> bool:
        return self.integers.fits(k)

    def split(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Split rows into integers int8 [n, k], codes uint8 [n, k], scales float16 [n, groups] and zero points uint8
        [n, groups]. A code is an integer plus the zero point of its group.

        A zero point is the least with which no code of its group is negative; of a symmetric format it is half the number of
        codes. Raises ValueError if rows have other groups, or integers that the codes do not hold.
        """
        form = self.integers
        values, scales = row_integers(form.kind, rows)
        n, k = values.shape
        groups = form.groups(k)
        shared = scales.reshape(n, groups, -1)
        if (shared.view(np.uint16) != shared[:, :, :1].view(np.uint16)).any():
            raise ValueError(f"scales differ within a group of {k // groups}")
        grouped = values.reshape(n, groups, -1)
        if form.symmetric:
            zeros = np.full((n, groups), 1 << form.bits - 1, np.uint8)
        else:
            zeros = np.maximum(-grouped.min(2), 0).astype(np.uint8)
            if (grouped.max(2) + zeros.astype(np.int16) >= 1 << form.bits).any():
                raise ValueError(f"a group has integers that {form.bits} bits do not hold")
        codes = (grouped.view(np.uint8) + zeros[:, :, None]).reshape(n, k)
        return values, codes, np.ascontiguousarray(shared[:, :, 0]), zeros
