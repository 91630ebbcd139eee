"""Cells of `headrace fit`, measured with the model on this machine."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from statistics import median
from typing import Any

from headrace.bench.fit_cells import NAMES, fitting
from headrace.bench.workers.ours import Worker
from headrace.startup.fit.shapes import ModelShape

ROUNDS = 5


def check(
    model: str,
    shape: ModelShape,
    chunk: int,
    setting: Mapping[str, Any],
    names: Sequence[str] = NAMES,
    done: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, float]]:
    """Measure the cells in turn, ROUNDS times: by cell the median ms and tokens/s.

    setting: arguments of LLM. done: called after each round. Raises what opening the model raises.
    """
    cells = [cell for cell in fitting(shape) if cell.name in names]
    tokens = max(cell.batch * (cell.prompt + cell.new_tokens + 128) for cell in cells)
    samples: dict[str, list[float]] = {cell.name: [] for cell in cells}
    settings = {**setting, "max_num_batched_tokens": chunk, "speculate": None}
    worker = Worker(model, settings.pop("threads", None), settings, tokens * shape.kv_block_bytes() / 16)
    with closing(worker.llm):
        for number in range(-1, ROUNDS):
            for cell in cells:
                prompts = cell.prompts(shape.vocab_size, number)
                prefill, decode, _ = worker.run(prompts, cell.new_tokens)
                if number >= 0:
                    samples[cell.name].append(decode / cell.new_tokens if cell.new_tokens else prefill)
            done()
    return {
        cell.name: {
            "ms": 1e3 * (seconds := median(samples[cell.name])),
            "tokens_per_s": (cell.batch if cell.new_tokens else cell.prompt) / seconds,
        }
        for cell in cells
    }
