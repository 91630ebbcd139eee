"""Matrices of q and k with their rotated rows in another order: wrong files, for negative controls."""

import torch

from headrace.data.config import LayerConfig
from headrace.models.families import FAMILIES

# Model classes whose positions are embeddings or a bias.
WITHOUT_ROPE = ("bert", "gpt2", "marian", "t5", "whisper")
ROTARY_FAMILIES = sorted(name for name, family in FAMILIES.items() if family.shape not in WITHOUT_ROPE)
QUERIES, KEYS = (".q_proj.", ".attn_q."), (".k_proj.", ".attn_k.")
# q, k and v in one matrix, one after the other, or for each K/V head.
JOINED, GROUPED = (".qkv_proj.", ".attn_qkv.", ".Wqkv."), (".wqkv.",)


def reordered(tensors: dict[str, torch.Tensor], layer: LayerConfig, pairs: bool) -> dict[str, torch.Tensor]:
    """The tensors of a file, q and k with halves turned into neighbouring pairs, or the other way round."""
    made = {}
    for name, rows in tensors.items():
        heads = rows.view(-1, layer.head_dim, *rows.shape[1:]).clone() if _heads(name, layer) is not None else rows
        for head in _heads(name, layer) or ():
            heads[head] = _turned(heads[head], layer, pairs)
        made[name] = heads.reshape(rows.shape)
    return made


def _heads(name: str, layer: LayerConfig) -> list[int] | None:
    """The heads of q and k in a matrix, None if it has neither."""
    if any(part in name for part in QUERIES):
        return list(range(layer.heads))
    if any(part in name for part in KEYS):
        return list(range(layer.kv_heads))
    if any(part in name for part in JOINED):
        return list(range(layer.heads + layer.kv_heads))
    if any(part in name for part in GROUPED):
        group = layer.heads // layer.kv_heads + 2
        return [head for head in range(layer.kv_heads * group) if head % group < group - 1]
    return None


def _turned(head: torch.Tensor, layer: LayerConfig, pairs: bool) -> torch.Tensor:
    """The rows of one head."""
    assert layer.rope is not None
    rotary = layer.rope.dim or layer.head_dim
    shape = (2, rotary // 2) if pairs else (rotary // 2, 2)
    first = head[:rotary].view(*shape, *head.shape[1:]).swapaxes(0, 1).reshape(head[:rotary].shape)
    return torch.cat([first, head[rotary:]])
