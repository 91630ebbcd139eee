"""Cells of `headrace fit`: batches and prompts whose times are predicted."""

from headrace.bench.interleave import CELLS, Cell
from headrace.startup.fit.costs import decode_seconds, prefill_seconds
from headrace.startup.fit.machine import Machine
from headrace.startup.fit.shapes import ModelShape
from headrace.startup.fit.sizes import ONE, Layout

# Cells of the planner; pp: prefill of a prompt, b: decoding by batch, b1_4k: one sequence after 4,000 tokens.
NAMES = ("pp512", "pp2048", "b1", "b4", "b8", "b16", "b32", "b1_4k")


def fitting(shape: ModelShape) -> list[Cell]:
    """Cells whose sequences are within the model's context."""
    return [CELLS[name] for name in NAMES if CELLS[name].prompt + CELLS[name].new_tokens < shape.max_position]


def predict(
    shape: ModelShape, machine: Machine, chunk: int, kv_dtype: str = "bfloat16", layout: Layout = ONE
) -> dict[str, dict[str, float]]:
    """By cell, milliseconds of the prompt or of a decoding step, and tokens/s."""
    cells = {}
    for cell in fitting(shape):
        if not cell.new_tokens:
            seconds = prefill_seconds(shape, cell.prompt, machine, chunk, kv_dtype, layout)
            tokens = cell.prompt
        else:
            context = cell.prompt + cell.new_tokens // 2
            seconds, tokens = decode_seconds(shape, cell.batch, context, machine, kv_dtype, layout), cell.batch
        cells[cell.name] = {"ms": 1e3 * seconds, "tokens_per_s": tokens / seconds}
    return cells
