"""MXFP4 folders (OCP Microscaling Formats 1.0) as transformers writes them (quant_method "mxfp4").

A matrix NAME [n, k]: NAME_blocks uint8 [n, k / 32, 16], two neighbours a byte, the low half first, and NAME_scales uint8
[n, k / 32], exponents of powers of two with bias 127.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.weights.kinds import KINDS
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes.base import QuantizedTensor, SchemeReader
from headrace.weights.schemes.rows import BLOCK, mxfp4_rows
from headrace.weights.source import TensorInfo

BLOCKS, SCALES = "_blocks", "_scales"


class MXFP4Reader(SchemeReader):
    """Reads MXFP4 folders. Raises WeightError for damaged files, and for matrices of experts, which are not built."""

    summary = "MXFP4"

    def __init__(self, folder: SafetensorsFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, "MXFP4")
        for blocks in folder.names():
            if not blocks.endswith(BLOCKS):
                continue
            name = blocks.removesuffix(BLOCKS)
            scales, shape = f"{name}{SCALES}", folder.info(blocks).shape
            if len(shape) == 4:
                raise self._stored.error(name, "belongs to experts, which are not supported")
            stored = folder.infos.get(scales)
            if stored is None or len(shape) != 3 or shape[2] != BLOCK // 2 or stored.shape != shape[:2]:
                raise self._stored.error(name, "lacks scales or has odd blocks; it is damaged")
            if {stored.kind, folder.info(blocks).kind} != {"U8"}:
                raise self._stored.error(name, "has blocks or scales of another type; it is damaged")
            size = (shape[0], shape[1] * BLOCK)
            name = name if name.endswith(".weight") else f"{name}.weight"
            info = TensorInfo(name, size, "MXFP4", shape[0] * shape[1] * KINDS["MXFP4"].nbytes)
            self.matrices[name] = QuantizedTensor(info, (blocks, scales))

    def rows(self, name: str) -> np.ndarray:
        blocks, scales = (self._stored.folder.array(part) for part in self.matrices[name].stored)
        return mxfp4_rows(blocks.reshape(len(blocks), -1), scales)
