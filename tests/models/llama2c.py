"""Reads the llama2.c format: a raw float32 checkpoint and its vocabulary of scored pieces.

Its q and k rows are rotary neighbours, as in GGUF, so the tensors are given out under GGUF's names.
"""

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.models.zoo import MemorySource


def read_checkpoint(path: Path) -> MemorySource:
    """The model as a source with GGUF names and metadata."""
    data = path.read_bytes()
    dim, ffn, layers, heads, kv_heads, vocab, context = struct.unpack_from("<7i", data)
    values = torch.from_numpy(np.frombuffer(data, "<f4", offset=28).copy())
    head_dim = dim // heads
    kv = kv_heads * head_dim
    at = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return values[at - size : at].view(shape)

    tensors = {"token_embd.weight": take(abs(vocab), dim)}
    per_layer = {
        "attn_norm": (dim,),
        "attn_q": (dim, dim),
        "attn_k": (kv, dim),
        "attn_v": (kv, dim),
        "attn_output": (dim, dim),
        "ffn_norm": (dim,),
        "ffn_gate": (ffn, dim),
        "ffn_down": (dim, ffn),
        "ffn_up": (ffn, dim),
    }
    for name, shape in per_layer.items():
        for i, tensor in enumerate(take(layers, *shape)):
            tensors[f"blk.{i}.{name}.weight"] = tensor
    tensors["output_norm.weight"] = take(dim)
    take(2, context, head_dim // 2)  # the angles, which we form ourselves
    if vocab < 0:
        tensors["output.weight"] = take(-vocab, dim)
    assert at == len(values), "the file is not a llama2.c checkpoint"
    settings: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.embedding_length": dim,
        "llama.feed_forward_length": ffn,
        "llama.block_count": layers,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.context_length": context,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    return MemorySource("gguf", tensors, settings)


def read_pieces(path: Path, count: int) -> list[bytes]:
    """The text of every token of a tokenizer.bin; `<0x0A>` stands for the byte itself."""
    data = path.read_bytes()
    at, pieces = 4, []
    for _ in range(count):
        _, size = struct.unpack_from("<fi", data, at)
        piece = data[at + 8 : at + 8 + size]
        at += 8 + size
        byte = re.fullmatch(rb"<0x([0-9A-F]{2})>", piece)
        pieces.append(bytes([int(byte[1], 16)]) if byte else piece)
    return pieces
