"""Cells of `headrace fit`, measured with the model on this machine.

The speed of a machine may change within seconds, by its clock and by what others do. So a linear layer of the calibration is
timed next to each cell, and the predicted time is scaled by its time here divided by its calibrated time.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from statistics import mean, median
from typing import Any

from headrace.backends.native.program import thread_pool
from headrace.bench.calibrate import CACHED, FEW, MANY_ROWS, MEMORY, PROBE, SHAPES, Layers
from headrace.bench.fit_cells import NAMES, fitting
from headrace.bench.interleave import Cell
from headrace.bench.workers.ours import Worker
from headrace.startup.fit.costs import Step, bytes_read
from headrace.startup.fit.machine import Machine
from headrace.startup.fit.shapes import ModelShape

ROUNDS = 5
# Rows of the probe next to a prompt.
PROMPT_ROWS = 512
# Share of a step's bytes from which the memory limits it.
HALF = 0.5


class Probe:
    """Linear layers of the calibration, which are read from where the cell reads: the cache or memory."""

    def __init__(self, machine: Machine, shape: ModelShape, kv_dtype: str, threads: int) -> None:
        self.machine, self.shape, self.kv_dtype = machine, shape, kv_dtype
        self.layers = Layers(PROBE, *SHAPES[1], MEMORY, thread_pool(threads))

    def slowness(self, cell: Cell) -> float:
        """Time of a layer now, with the rows of a step of the cell, divided by its calibrated time."""
        rows = cell.batch if cell.new_tokens else min(cell.prompt, PROMPT_ROWS)
        step = Step(1, cell.batch, cell.prompt, kv_dtype=self.kv_dtype)
        from_cache = self.machine.memory_share(bytes_read(self.shape, step)) < HALF
        read = FEW if rows > MANY_ROWS else CACHED if from_cache else MEMORY
        size, curve = self.layers.size, self.machine.curve(PROBE)
        assert curve is not None
        return self.layers.seconds(rows, read) / self.machine.in_step(curve.seconds(rows, size), size, rows, read)


def check(
    model: str,
    shape: ModelShape,
    chunk: int,
    setting: Mapping[str, Any],
    names: Sequence[str] = NAMES,
    machine: Machine | None = None,
    done: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, float]]:
    """Measure the cells in turn, ROUNDS times: by cell the median ms and tokens/s, and `slowness` next to it.

    setting: arguments of LLM. machine: measured; slowness is 1 without one. done: called after each round. Raises what opening
    the model raises.
    """
    cells = [cell for cell in fitting(shape) if cell.name in names]
    tokens = max(cell.batch * (cell.prompt + cell.new_tokens + 128) for cell in cells)
    samples: dict[str, list[tuple[float, float]]] = {cell.name: [] for cell in cells}
    settings = {**setting, "max_num_batched_tokens": chunk, "speculate": None}
    threads = settings.pop("threads", None)
    worker = Worker(model, threads, settings, tokens * shape.kv_block_bytes() / 16)
    probe = None
    if machine is not None and machine.measured:
        probe = Probe(machine, shape, setting.get("kv_dtype", "bfloat16"), threads or 0)
    with closing(worker.llm):
        for number in range(-1, ROUNDS):
            for cell in cells:
                prompts = cell.prompts(shape.vocab_size, number)
                before = probe.slowness(cell) if probe else 1.0
                prefill, decode, _ = worker.run(prompts, cell.new_tokens)
                after = probe.slowness(cell) if probe else 1.0
                if number >= 0:
                    seconds = decode / cell.new_tokens if cell.new_tokens else prefill
                    samples[cell.name].append((seconds, mean((before, after))))
            done()
    return {cell.name: _cell(cell, samples[cell.name]) for cell in cells}


def _cell(cell: Cell, samples: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The figures of a cell. samples: seconds and slowness of each round."""
    seconds = median(each for each, _ in samples)
    return {
        "ms": 1e3 * seconds,
        "tokens_per_s": (cell.batch if cell.new_tokens else cell.prompt) / seconds,
        # Of the round whose time is the median after it is divided by its own slowness.
        "slowness": seconds / median(each / slowness for each, slowness in samples),
    }
