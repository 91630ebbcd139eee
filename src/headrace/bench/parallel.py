"""bench parallel: one model in several processes next to one process, in alternation, and the steps of a pipeline over time."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from headrace import host
from headrace.bench.figures import Column
from headrace.bench.interleave import Cell
from headrace.bench.machine import BandwidthProbe, machine
from headrace.bench.plots import LIGHT, STYLE
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.parallel.pipeline.bubbles import decode_schedule, idle_share, schedule
from headrace.parallel.pipeline.executor import PipelineExecutor

CELLS = {
    cell.name: cell
    for cell in (
        Cell("pp512", 1, 512, 0),
        Cell("pp2048", 1, 2048, 0),
        Cell("b1", 1, 128, 32),
        Cell("b8", 8, 128, 32),
        Cell("b16", 16, 128, 32),
    )
}
MODE = re.compile(r"(tp|pp)([1-9]\d?)")
COLUMNS = (
    Column("mode", "{mode}"),
    Column("cell", "{cell}"),
    Column("tokens/s", "{tokens_per_s:.1f}"),
    Column("of 1 x 1", "{of_one:.3f}"),
    Column("of 1 x N", "{of_all:.3f}"),
    Column("predicted", lambda row: None if row["predicted"] is None else f"{row['predicted']:.1f}"),
    Column("idle", lambda row: None if row["idle"] is None else f"{row['idle']:.1%}"),
)

Times = list[list[tuple[float, float]]]  # by step: begin and end on each stage


@dataclass(slots=True)
class Variant:
    """One way to run the model. processes: how many it has, each with one thread, if it is a mode."""

    name: str
    llm: LLM
    processes: int = 1

    @property
    def pipeline(self) -> PipelineExecutor | None:
        executor = self.llm.engine.executor
        return executor if isinstance(executor, PipelineExecutor) else None


def settings_of(mode: str) -> dict[str, int]:
    """Settings of a mode such as pp2, tp2 or tp2pp2. Raises ValueError for another name."""
    parts = MODE.findall(mode)
    if not parts or "".join(map("".join, parts)) != mode or len({name for name, _ in parts}) < len(parts):
        raise ValueError(f"there is no mode {mode!r}; write pp2, tp2 or tp2pp2")
    return {name: int(count) for name, count in parts}


def measure(
    model: str | Path,
    modes: Sequence[str],
    cells: Sequence[Cell],
    rounds: int,
    say: Callable[[str], None],
    done: Callable[[str, dict[str, Any]], None] = lambda name, figures: None,
) -> dict[str, Any]:
    """Speed of each cell in one process with one thread, in one with a thread per core, and in each mode with one thread per
    process: medians of `rounds` measurements in alternation. Their tokens must be equal."""
    longest = max(cell.prompt + cell.new_tokens for cell in cells) + 16
    common: dict[str, Any] = {
        "max_num_seqs": max(cell.batch for cell in cells),
        "max_model_len": longest,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
        "speculate": None,
    }
    result: dict[str, Any] = {"model": str(model), "machine": machine(), "rounds": rounds, "cells": {}}
    with ExitStack() as stack:

        def opened(name: str, processes: int, **settings: Any) -> Variant:
            say(f"loading {name}")
            return Variant(name, stack.enter_context(LLM(model, **common, **settings)), processes)

        variants = [opened("1 x 1", 1, threads=1), opened(f"1 x {host.cores()}", 1, threads=host.cores())]
        for mode in modes:
            settings = settings_of(mode)
            processes = settings.get("tp", 1) * settings.get("pp", 1)
            variants.append(opened(mode, processes, threads=1, **settings))
        for cell in cells:
            figures = _measure_cell(variants, cell, rounds)
            result["cells"][cell.name] = figures
            done(cell.name, figures)
    return result


def _measure_cell(variants: Sequence[Variant], cell: Cell, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    traces: dict[str, Times] = {}
    reader, bandwidth = BandwidthProbe(host.cores()), list[float]()
    for number in range(-1, rounds):
        bandwidth.append(reader.gb_per_s())
        tokens = {}
        for variant in variants if number % 2 else reversed(variants):
            if variant.pipeline is not None:
                variant.pipeline.trace = traces[variant.name] = []  # of the last round
            took, tokens[variant.name] = _run(variant.llm, cell, number)
            if number >= 0:
                seconds[variant.name].append(took)
        if len(set(map(str, tokens.values()))) > 1:
            raise RuntimeError(f"{cell.name}: the modes gave different tokens: a fault of Headrace, please report it")
    one, every = (median(seconds[variant.name]) for variant in variants[:2])
    count = cell.batch * (cell.new_tokens or cell.prompt)
    rows = {}
    for variant in variants:
        took = median(seconds[variant.name])
        rows[variant.name] = {
            "tokens_per_s": count / took,
            "of_one": one / took,
            "of_all": every / took,
            "seconds": seconds[variant.name],
            "predicted": None,
            "idle": None,
        }
        if trace := traces.get(variant.name):
            rows[variant.name] |= {"predicted": _predicted(trace, cell), "idle": idle_share(by_stage(trace)), "trace": trace}
    return {"modes": rows, "bandwidth_gbs": bandwidth}


def _run(llm: LLM, cell: Cell, seed: int) -> tuple[float, list[list[int]]]:
    """Seconds of the measured part, and the tokens: of prefill until the first tokens, or of decoding after them."""
    prompts = cell.prompts(llm.model_config.vocab_size, seed)
    params = SamplingParams(temperature=0.0, max_tokens=1 + cell.new_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = [llm.add(prompt, params) for prompt in prompts]
    while any(not output.outputs or not output.outputs[0].token_ids for output in outputs):
        llm.step()
    if cell.new_tokens:
        executor = llm.engine.executor
        if isinstance(executor, PipelineExecutor) and executor.trace is not None:
            executor.trace.clear()
        began = time.perf_counter()
    while not all(output.finished for output in outputs):
        llm.step()
    return time.perf_counter() - began, [output.outputs[0].token_ids for output in outputs]


def by_stage(trace: Times) -> Times:
    """The steps of each stage, from a list of steps."""
    return [list(stage) for stage in zip(*trace, strict=True)]


def _predicted(trace: Times, cell: Cell) -> float:
    """Tokens per second if stages lost no time between the steps that ran: a prompt's chunks pass once; decoding batches take
    turns, one for each stage."""
    durations = [[end - begin for begin, end in stage] for stage in by_stage(trace)]
    if not cell.new_tokens:
        return cell.prompt * cell.batch / schedule(durations)[-1][-1][1]
    lanes = min(len(durations), cell.batch)
    ended = decode_schedule([median(stage) for stage in durations], lanes, cell.new_tokens)[-1][-1][1]
    return cell.batch * cell.new_tokens / ended


def picture(trace: Times, title: str) -> str:
    """SVG of the steps over time, one line of boxes for each stage; boxes of one step have one colour."""
    stages = by_stage(trace)
    first, last = trace[0][0][0], max(end for stage in stages for _, end in stage)
    width, line, left = 760, 34, 74
    scale = (width - left - 16) / (last - first)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {60 + line * len(stages)}" role="img">',
        f"<style>{STYLE}</style><title>{escape(title)}</title>",
        '<rect class="ground" width="100%" height="100%"/>',
        f'<text x="16" y="20" font-weight="600">{escape(title)}</text>',
    ]
    for number, stage in enumerate(stages):
        top = 32 + line * number
        parts.append(f'<text x="16" y="{top + 18}">stage {number}</text>')
        for step, (begin, end) in enumerate(stage):
            x, wide = left + (begin - first) * scale, max((end - begin) * scale - 1, 0.5)
            parts.append(f'<rect class="h{step % len(LIGHT)}" x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{line - 8}"/>')
    idle = f"{(last - first) * 1000:.0f} ms; stages are idle {idle_share(stages):.1%} of the time"
    parts.append(f'<text class="about" x="{left}" y="{46 + line * len(stages)}">{idle}</text></svg>')
    return "\n".join(parts) + "\n"
