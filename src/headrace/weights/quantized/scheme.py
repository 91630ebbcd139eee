"""What a scheme is: how a checkpoint stores a matrix. One module each, chosen by quant_method of its quantization_config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.weights.dequant import read_floats
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.source import TensorInfo, WeightError

SCALES = ("F16", "BF16", "F32")  # that scales are stored as


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix by its header: what it is read as, and the stored tensors that stand for it. `input_scale`: the one that all its
    inputs are rounded to int8 with (static W8A8)."""

    info: TensorInfo
    stored: tuple[str, ...]
    input_scale: float | None = None


class Scheme(Protocol):
    """Reads the matrices of a folder."""

    @property
    def matrices(self) -> Mapping[str, QuantizedTensor]:
        """ "model.layers.0.mlp.up_proj.weight" -> what it is."""
        ...

    @property
    def summary(self) -> str:
        """For people: "GPTQ, 4 bits, groups of 128"."""
        ...

    def rows(self, name: str) -> np.ndarray:
        """uint8 [rows, row_bytes] of the matrix's kind, a copy of its own. Raises WeightError."""
        ...

    def columns(self, name: str) -> np.ndarray | None:
        """As WeightSource.columns."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The tensors of a folder by the matrix that they stand for: "<matrix>.<field>"."""

    folder: SafetensorsFolder
    scheme: str

    def prefixes(self, field: str) -> list[str]:
        """The matrices that have a field."""
        ending = f".{field}"
        return [name.removesuffix(ending) for name in self.folder.names() if name.endswith(ending)]

    def has(self, matrix: str, field: str) -> bool:
        return f"{matrix}.{field}" in self.folder.infos

    def info(self, matrix: str, field: str) -> TensorInfo:
        """Raises WeightError where the matrix lacks the field."""
        if not self.has(matrix, field):
            raise self.error(matrix, f"has no {field}; the file is incomplete, download it again")
        return self.folder.info(f"{matrix}.{field}")

    def shape(self, matrix: str, field: str, kinds: tuple[str, ...], shape: tuple[int, ...]) -> None:
        """Raise WeightError unless the field has one of these types and this shape."""
        info = self.info(matrix, field)
        if info.kind not in kinds or info.shape != shape:
            sizes = [" x ".join(map(str, one)) or "a number" for one in (info.shape, shape)]
            raise self.error(
                matrix, f"has {field} of {info.kind} {sizes[0]} and needs {kinds[0]} {sizes[1]}; the file is damaged"
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
        """float32 scales of a field as float16. Raises WeightError where one changes by more than 2^-11 of itself; what is no
        number stays none."""
        with np.errstate(all="ignore"):
            made = scales.astype(np.float16)
            apart = np.abs(made.astype(np.float32) - scales)
        if (apart[np.isfinite(scales)] > np.abs(scales[np.isfinite(scales)]) * 2.0**-11).any():
            raise self.error(matrix, f"has a {field} too large or too small for 16 bits; take the model's own safetensors")
        return made

    def error(self, matrix: str, what: str) -> WeightError:
        return WeightError(f"{self.folder.path}: {self.scheme} matrix {matrix!r} {what}")
