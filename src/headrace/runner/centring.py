"""K less a constant: softmax does not see it, and what is left loses less when it is rounded to bfloat16, int8 or int4.

A model's file may have the mean of its keys (weights.kv_settings). Else it is of their bias: Qwen2's keys carry biases of up
to some hundreds, in pairs of values that the rotation hardly turns within the context. They add the same to the scores of all
tokens but for that turn, and their rounding was most of the error of attention.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.data.config import ModelConfig
from headrace.models.base import Model
from headrace.runner.last_use import by_softmax_alone
from headrace.runner.record import Node, RecordError, Segment, record

Biases = Callable[[Any], np.ndarray | None]  # a linear layer's bias, float32 and flat; None where it has none

TURN = math.pi / 3  # a vector that turns by less is, less its first place, no longer than it was


def k_shift(
    segment: Segment, node: Node, biases: Biases, config: ModelConfig, centre: np.ndarray | None = None
) -> np.ndarray | None:
    """What to take off every K [kv_heads * head_dim] of an attention node once it is turned: `centre` [layers, kv_heads *
    head_dim], or its bias where the rotation stays below a sixth of a turn. None: there is neither, or more than softmax sees
    the scores."""
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


def k_shifts(model: Model, biases: Biases) -> np.ndarray | None:
    """That of every layer which stores K, for a file that says nothing: float32 [layers, kv_heads * head_dim]; None where
    there is none, or the model cannot be recorded."""
    try:
        layers = record(model, embeds=False).layers
    except RecordError:
        return None
    found = {}
    for segment in layers:
        for node in segment.nodes:
            if node.op == "attention" and (shift := k_shift(segment, node, biases, model.config)) is not None:
                found[node.settings["layer"]] = shift
    if not found:
        return None
    made = np.zeros((sum(not layer.shares for layer in model.config.layers), len(next(iter(found.values())))), np.float32)
    for layer, shift in found.items():
        made[layer] = shift
    return made


def _bias(segment: Segment, value: int, biases: Biases) -> np.ndarray | None:
    """The bias of the linear layer that makes a value."""
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
