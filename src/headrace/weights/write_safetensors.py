"""Writer of safetensors files, tensor by tensor.

The format: https://github.com/huggingface/safetensors#format.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from headrace.weights.source import Chunks, TensorInfo, write_chunks


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
    with path.open("wb") as file:
        file.write(safetensors_header(tensors))
        write_chunks(file, tensors, chunks)
        file.flush()
        os.fsync(file.fileno())
