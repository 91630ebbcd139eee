"""Cells of `headrace fit`: predicted times, and measured ones of the model on this machine."""

from collections.abc import Callable, Mapping
from contextlib import closing
from statistics import median
from typing import Any

from headrace.bench.calibrate import calibrate
from headrace.bench.interleave import CELLS, Cell
from headrace.bench.machine import BandwidthProbe
from headrace.bench.workers.ours import Worker
from headrace.startup.fit.costs import decode_seconds, prefill_seconds
from headrace.startup.fit.machine import Machine
from headrace.startup.fit.shapes import ModelShape
from headrace.startup.fit.sizes import ONE, Layout

__all__ = ["NAMES", "calibrate", "check", "error_of", "predict"]

# Cells of the planner; pp: prefill of a prompt, b: decoding by batch, b1_4k: one sequence after 4,000 tokens.
NAMES = ("pp512", "pp2048", "b1", "b4", "b8", "b16", "b32", "b1_4k")
ROUNDS = 5
Ask = Callable[..., dict[str, Any]]


def fitting(shape: ModelShape) -> list[Cell]:
    """Cells whose sequences are within the model's context."""
    return [CELLS[name] for name in NAMES if CELLS[name].prompt + CELLS[name].new_tokens < shape.max_position]


def predict(
    shape: ModelShape, machine: Machine, chunk: int, kv_dtype: str = "bfloat16", layout: Layout = ONE
) -> dict[str, dict[str, float]]:
    """By cell, milliseconds of the prompt or of a decoding step, and tokens/s."""
    made = {}
    for cell in fitting(shape):
        if not cell.new_tokens:
            seconds = prefill_seconds(shape, cell.prompt, machine, chunk, kv_dtype, layout)
            tokens = cell.prompt
        else:
            context = cell.prompt + cell.new_tokens // 2
            seconds, tokens = decode_seconds(shape, cell.batch, context, machine, kv_dtype, layout), cell.batch
        made[cell.name] = {"ms": 1e3 * seconds, "tokens_per_s": tokens / seconds}
    return made


def check(
    model: str,
    shape: ModelShape,
    chunk: int,
    setting: Mapping[str, Any],
    threads: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, float]]:
    """Measure the cells in turn, ROUNDS times: by cell ms and tokens/s, the bandwidth in GB/s read next to it.

    setting: arguments of LLM. done: called after each round. Raises what opening the model raises.
    """
    cells = fitting(shape)
    tokens = max(cell.batch * (cell.prompt + cell.new_tokens + 128) for cell in cells)
    samples: dict[str, list[float]] = {cell.name: [] for cell in cells}
    bandwidth: dict[str, list[float]] = {cell.name: [] for cell in cells}
    probe = BandwidthProbe()
    settings = {**setting, "max_num_batched_tokens": chunk, "speculate": None}
    worker = Worker(model, threads or 0, settings, tokens * shape.kv_block_bytes() / 16)
    with closing(worker.llm):
        for number in range(-1, ROUNDS):
            for cell in cells:
                prompts = cell.prompts(shape.vocab_size, number)
                prefill, decode, _ = worker.run(prompts, cell.new_tokens)
                seconds = decode / cell.new_tokens if cell.new_tokens else prefill
                if number >= 0:
                    samples[cell.name].append(seconds)
                    bandwidth[cell.name].append(probe.gb_per_s(1))
            done()
    return {
        cell.name: {
            "ms": 1e3 * (seconds := median(samples[cell.name])),
            "tokens_per_s": (cell.batch if cell.new_tokens else cell.prompt) / seconds,
            "bandwidth_gb_s": median(bandwidth[cell.name]),
        }
        for cell in cells
    }


def error_of(predicted: Mapping[str, float], measured: Mapping[str, float]) -> float:
    """Relative error of a predicted time."""
    return predicted["ms"] / measured["ms"] - 1
