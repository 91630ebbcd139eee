"""Writer of safetensors files, tensor by tensor.

The format: https://github.com/huggingface/safetensors#format.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from headrace.weights.source import TensorInfo

Chunks = Iterable[tuple[str, np.ndarray]]  # tensor name, bytes


def safetensors_header(tensors: Sequence[TensorInfo]) -> bytes:
    """All bytes before the first tensor's. kind of a tensor: a type of the format (F16, U8, I8 …)."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for info in tensors:
        entries[info.name] = {"dtype": info.kind, "shape": list(info.shape), "data_offsets": [start, start + info.nbytes]}
        start += info.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(path: Path, tensors: Sequence[TensorInfo], chunks: Chunks) -> None:
    """Write a file. chunks: bytes of the tensors in order, each in any number of pieces.

    Raises OSError, and ValueError if the chunks do not fit the tensors.
    """
    left, order = {info.name: info.nbytes for info in tensors}, [info.name for info in tensors]
    with path.open("wb") as file:
        file.write(safetensors_header(tensors))
        for name, data in chunks:
            if not order or name != order[0] or data.nbytes > left[name]:
                raise ValueError(f"bytes of tensor {name!r} do not fit the file's header")
            file.write(np.ascontiguousarray(data).data)
            left[name] -= data.nbytes
            if not left[name]:
                order.pop(0)
        if order:
            raise ValueError(f"bytes of tensor {order[0]!r} are missing")
        file.flush()
        os.fsync(file.fileno())
