"""K minus a constant before it is stored: softmax does not change, and the smaller rest loses less when rounded to bfloat16,
int8 or int4.

A model's file may contain the mean of its keys (weights.kv_settings). Otherwise the constant is the keys' bias: Qwen2's biases
reach some hundreds, in pairs of values that the rotation hardly turns within the context. They add almost the same to the
scores of all tokens, and their rounding was most of the error of attention.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from headrace.data.config import ModelConfig
from headrace.models.base import Model
from headrace.runner.last_use import by_softmax_alone
from headrace.runner.record import Node, RecordError, Segment, record

Biases = Callable[[Any], np.ndarray | None]  # a linear layer's bias, float32 [n_out]; None if it has none

TURN = math.pi / 3  # a vector turned by less, minus its first position, is no longer than before


def k_shift(
    segment: Segment, node: Node, biases: Biases, config: ModelConfig, centre: Mapping[int, np.ndarray] | None = None
) -> np.ndarray | None:
    """The constant to subtract from K [kv_heads * head_dim] of an attention node after rotation; None for none.

    centre: mean keys [kv_heads * head_dim] by layer. Without it, the bias of those pairs that the rotation turns by less than a
    sixth of a turn within the context. None also if anything but softmax reads the scores.
    """
    settings = node.settings
    if "k" not in node.inputs or not by_softmax_alone(node):
        return None
    if centre is not None:
        own: np.ndarray = centre[settings["layer"]]
        return own if own.any() else None
    rope, bias = settings["rope"], _bias(segment, node.inputs["k"], biases)
    if rope is None or bias is None or settings["k_norm"] is not None:
        return None
    still = rope.frequencies * config.max_position <= TURN
    pairs = np.repeat(still, 2) if rope.interleaved else np.tile(still, 2)
    head_dim = config.layers[settings["layer"]].head_dim
    kept = np.zeros(head_dim, bool)
    kept[: rope.dim] = pairs
    shift: np.ndarray = np.where(kept, bias.reshape(-1, head_dim), np.float32(0)).reshape(-1)
    return shift if shift.any() else None


def k_shifts(model: Model, biases: Biases) -> dict[int, np.ndarray]:
    """The constants for a file without mean keys, float32 [kv_heads * head_dim] by layer; none if the model cannot be
    recorded."""
    try:
        layers = record(model, embeds=False).layers
    except RecordError:
        return {}
    shifts = {}
    for segment in layers:
        for node in segment.nodes:
            if node.op == "attention" and (shift := k_shift(segment, node, biases, model.config)) is not None:
                shifts[node.settings["layer"]] = shift
    return shifts


def _bias(segment: Segment, value: int, biases: Biases) -> np.ndarray | None:
    """The bias of the linear layer that outputs a value."""
    maker = next((node for node in segment.nodes if value in node.outputs), None)
    if maker is None or maker.op != "linear":
        return None
    layer = maker.settings["w"]
    bias = biases(layer)
    if bias is None or not layer.split:
        return bias
    part = maker.outputs.index(value)
    start = sum(layer.sizes[:part])
    return bias[start : start + layer.sizes[part]]
