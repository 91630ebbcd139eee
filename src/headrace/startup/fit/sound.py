"""Speech models for the planner: the encoder of a window of sound, its bytes, and the time of a window."""

from dataclasses import replace
from typing import Any

from headrace.startup.fit.costs import Step, decode_seconds, prefill_seconds, step_seconds
from headrace.startup.fit.machine import Machine
from headrace.startup.fit.shapes import LayerShape, ModelShape

WINDOW_SECONDS = 30
PROMPT, WRITTEN = 4, 100  # tokens before a window's text, and of it


def encoder_shape(shape: ModelShape) -> ModelShape:
    """The encoder as layers for one step of a row per position: its own, the convolutions, and the projections to the K and V
    of each decoder layer. The first convolution has two rows for each position."""
    first, second = shape.convolutions
    crossing = (linear for layer in shape.layers for linear in layer.linears if linear.name == "cross_kv")
    others = [first, first, second, *(replace(linear, name="source_kv") for linear in crossing)]
    layers = (*(LayerShape(0, 0, 0, 0, (linear,)) for linear in others), *shape.encoder_layers)
    return replace(shape, layers=layers, source_positions=0, encoder_layers=(), convolutions=(), config=None)


def window_record(shape: ModelShape, machine: Machine, batch: int, kv_dtype: str) -> dict[str, Any]:
    """Time of windows of sound: the encoder of one, a token of `batch` windows, and all of one window."""
    rows = shape.source_positions
    # Every row reads every other: as many pairs as a step of half as many tokens before.
    encode = step_seconds(encoder_shape(shape), Step(rows, 1, rows // 2, 0, kv_dtype), machine)
    token = decode_seconds(shape, batch, PROMPT + WRITTEN, machine, kv_dtype)
    prompt = prefill_seconds(shape, PROMPT, machine, PROMPT, kv_dtype)
    whole = encode + prompt + WRITTEN * token / batch
    return {
        "seconds": WINDOW_SECONDS,
        "tokens": WRITTEN,
        "batch": batch,
        "encoder_ms": 1e3 * encode,
        "token_ms": 1e3 * token,
        "window_ms": 1e3 * whole,
        "speed": WINDOW_SECONDS / whole,
    }
