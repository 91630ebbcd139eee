"""QuantizedFolder: a folder in a scheme of quantized weights, as a WeightSource whose matrices are rows of a kind."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.weights.ctranslate2 import CTranslate2Folder, is_ctranslate2
from headrace.weights.ggml import GGMLFile
from headrace.weights.gguf import GGUFFile
from headrace.weights.model_files import is_ggml
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes.awq import AWQReader
from headrace.weights.schemes.base import SchemeReader
from headrace.weights.schemes.bitsandbytes import BitsAndBytesReader
from headrace.weights.schemes.compressed_tensors import CompressedTensorsReader, activations_of
from headrace.weights.schemes.fp8 import FP8Reader
from headrace.weights.schemes.gptq import GPTQReader
from headrace.weights.schemes.mxfp4 import MXFP4Reader
from headrace.weights.schemes.two_four import METHOD, TwoFourReader
from headrace.weights.source import TensorInfo, WeightSource

SETTINGS = "quantization_config"
SCHEMES: dict[str, Callable[[SafetensorsFolder, Mapping[str, Any]], SchemeReader]] = {  # by quant_method
    "awq": AWQReader,
    "bitsandbytes": BitsAndBytesReader,
    "compressed-tensors": CompressedTensorsReader,
    "fbgemm_fp8": FP8Reader,
    "fp8": FP8Reader,
    "gptq": GPTQReader,
    METHOD: TwoFourReader,
    "mxfp4": MXFP4Reader,
}


class QuantizedFolder:
    """A safetensors folder and the scheme that reads its matrices; other tensors are read by the folder.

    config: config.json without quantization_config. text_only: as of the folder. activations: rounding of inputs that it asks
    for ("auto", "token", "tensor").
    """

    format: Literal["gguf", "safetensors"] = "safetensors"

    def __init__(self, folder: SafetensorsFolder, scheme: SchemeReader, activations: str = "auto") -> None:
        self.path, self.files = folder.path, folder.files
        self.config = {key: value for key, value in folder.config.items() if key != SETTINGS}
        self.text_only = folder.text_only
        self.scheme, self.activations = scheme, activations
        self._folder = folder
        self._of = {part: name for name, matrix in scheme.matrices.items() for part in matrix.stored}

    def __enter__(self) -> "QuantizedFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """Names of all tensors, each matrix once, in file order."""
        return list(dict.fromkeys(self._of.get(name, name) for name in self._folder.names()))

    def info(self, name: str) -> TensorInfo:
        """Shape and kind of a tensor. Raises WeightError if there is none of that name."""
        matrix = self.scheme.matrices.get(name)
        return self._folder.info(name) if matrix is None else matrix.info

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        matrix = self.scheme.matrices.get(name)
        return sum(self._folder.info(part).nbytes for part in ([name] if matrix is None else matrix.stored))

    def raw(self, name: str) -> np.ndarray:
        """Rows of a kind, uint8 [rows, row bytes]; of a quantized matrix decoded into a new array. Raises WeightError."""
        return self.scheme.rows(name) if name in self.scheme.matrices else self._folder.raw(name)

    def columns(self, name: str) -> np.ndarray | None:
        """Column order of a matrix with act-order, or None."""
        return self.scheme.columns(name) if name in self.scheme.matrices else None

    def mapped(self, name: str) -> bool:
        """True if the rows are in a mapped file."""
        return name not in self.scheme.matrices

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory; it can still be read."""
        matrix = self.scheme.matrices.get(name)
        for part in [name] if matrix is None else matrix.stored:
            self._folder.release(part)

    def close(self) -> None:
        """Close the files."""
        self._folder.close()


def input_scale(source: WeightSource, names: Iterable[str]) -> float | None:
    """Largest static input scale of matrices; None if one of them has none."""
    if not isinstance(source, QuantizedFolder):
        return None
    scales = [None if (one := source.scheme.matrices.get(name)) is None else one.input_scale for name in names]
    known = [scale for scale in scales if scale is not None]
    return max(known) if known and len(known) == len(scales) else None


def open_weights(path: Path) -> "GGUFFile | SafetensorsFolder | QuantizedFolder":
    """Open the weights at a path: a folder, a GGUF file, or a ggml file of whisper.cpp. Raises WeightError."""
    if path.is_dir():
        return open_folder(path)
    return GGMLFile(path) if is_ggml(path) else GGUFFile(path)


def open_folder(path: str | Path) -> SafetensorsFolder | QuantizedFolder:
    """Open a folder with safetensors, quantized or not. Raises WeightError.

    A folder with an unknown quant_method opens as a plain one; reading the model's config then refuses it by name.
    """
    if is_ctranslate2(Path(path)):
        return CTranslate2Folder(path)
    folder = SafetensorsFolder(path)
    settings = folder.config.get(SETTINGS)
    if isinstance(settings, Mapping) and (scheme := SCHEMES.get(str(settings.get("quant_method")))) is not None:
        return QuantizedFolder(folder, scheme(folder, settings), activations_of(settings))
    return folder
