"""Mixes of GGUF kinds: the kind of each tensor, by the names and rules of llama.cpp's llama-quantize.

Mixes with S, M or L give more bits to the matrices that lose most by rounding (values, the MLP's down projection, the head).
"""

import re

from headrace.data.config import ModelConfig
from headrace.weights.kinds import FLOATS, KINDS

# Name -> (kind of most matrices, general.file_type).
MIXES = {
    "Q2_K": ("Q2_K", 10),
    "Q2_K_S": ("Q2_K", 21),
    "Q3_K_S": ("Q3_K", 11),
    "Q3_K_M": ("Q3_K", 12),
    "Q3_K_L": ("Q3_K", 13),
    "Q4_0": ("Q4_0", 2),
    "Q4_1": ("Q4_1", 3),
    "IQ4_NL": ("IQ4_NL", 25),
    "Q4_K_S": ("Q4_K", 14),
    "Q4_K_M": ("Q4_K", 15),
    "Q5_0": ("Q5_0", 8),
    "Q5_1": ("Q5_1", 9),
    "Q5_K_S": ("Q5_K", 16),
    "Q5_K_M": ("Q5_K", 17),
    "Q6_K": ("Q6_K", 18),
    "Q8_0": ("Q8_0", 7),
    "MXFP4": ("MXFP4", 38),
    "F16": ("F16", 1),
    "BF16": ("BF16", 32),
    "F32": ("F32", 0),
}
SHORT = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
# If rows are not whole super-blocks.
INSTEAD = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
TABLE, HEAD = "token_embd.weight", "output.weight"
KEPT = re.compile(r".*norm.*|position_embd.weight|token_types.weight|.*\.bias")  # stay float32


def mix_in(name: str) -> str | None:
    """The mix that a file name contains, the longest if several match; None without one."""
    text = name.upper()
    return max((mix for mix in MIXES if mix in text), key=len, default=None)


def tensor_kind(mix: str, name: str, width: int, config: ModelConfig, important: bool = False, head: str | None = None) -> str:
    """Kind of tensor `name`, whose rows have `width` numbers; a smaller-block kind if rows are not whole blocks.

    important: importance is known. head: kind of the output projection in place of the mix's.
    """
    if KEPT.fullmatch(name):
        return "F32"
    kind, is_head = MIXES[mix][0], name == HEAD or (name == TABLE and config.tied_head)
    if is_head and head is not None:
        kind = head
    elif kind not in FLOATS:
        kind = _head(kind, width) if is_head else _by_rule(mix, kind, name, config, important)
    while width % KINDS[kind].block:
        kind = INSTEAD.get(kind, "F16")
    return kind


def _head(kind: str, width: int) -> str:
    return "Q8_0" if kind == "Q8_0" or width % KINDS["Q6_K"].block else "Q6_K"


def _by_rule(mix: str, kind: str, name: str, config: ModelConfig, important: bool) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None:
        return kind
    layer, count = int(match[1]), config.num_layers
    grouped = config.layers[layer].heads // config.layers[layer].kv_heads >= 4
    if match[2] == "attn_v":
        return _values(mix, kind, layer, count, grouped)
    if match[2] == "ffn_down":
        return _down(mix, kind, layer, count, important)
    if match[2] == "attn_output":
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(mix, kind)
    if match[2] == "attn_qkv":
        return {"Q3_K_M": "Q4_K", "Q3_K_L": "Q4_K", "Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"}.get(mix, kind)
    return kind


def _values(mix: str, kind: str, layer: int, count: int, grouped: bool) -> str:
    """Kind of the value projection: with grouped heads it is small, so that bits are cheap."""
    if mix == "Q2_K":
        kind = "Q4_K" if grouped else "Q3_K"
    elif mix == "Q3_K_M":
        kind = "Q5_K" if layer < 2 else "Q4_K"
    elif (mix in ("Q4_K_M", "Q5_K_M")) and _more_bits(layer, count):
        kind = "Q6_K"
    elif mix == "Q3_K_L" or (mix == "Q4_K_S" and layer < 4) or (mix == "IQ4_NL" and grouped):
        kind = "Q5_K"
    elif mix == "Q2_K_S" and grouped:
        kind = "Q4_K"
    return "Q5_K" if count == 80 and kind in ("Q3_K", "Q4_K") else kind  # the 70B models: eight queries to a head


def _down(mix: str, kind: str, layer: int, count: int, important: bool) -> str:
    first = layer < count // 8
    if mix == "Q2_K":
        return "Q3_K"
    if mix == "Q2_K_S" and first:
        return "Q4_K"
    if mix == "Q3_K_M":
        return "Q5_K" if layer < count // 16 else "Q4_K"
    if mix == "Q3_K_L" or (mix == "Q4_K_S" and first) or (mix == "IQ4_NL" and first and not important):
        return "Q5_K"
    if mix in ("Q4_K_M", "Q5_K_M") and _more_bits(layer, count):
        return "Q6_K"
    return {"Q4_0": "Q4_1", "Q5_0": "Q5_1"}.get(mix, kind) if first and important else kind


def _more_bits(layer: int, count: int) -> bool:
    """True for the first and last eighth of the layers, and every third between."""
    return layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2
