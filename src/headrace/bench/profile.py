"""Where the time of a step goes: each phase and kind of kernel beside what it touches, and what the machine can do."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from headrace.backends.native.program import NativeProgram
from headrace.backends.native.threads import thread_pool
from headrace.bench.competitors import heading
from headrace.bench.machine import Say
from headrace.core import core
from headrace.data.params import SamplingParams
from headrace.llm import LLM

ROWS = (1, 4, 8, 16, 32, 256)
MOST_SEQUENCES = 32  # more rows than that are those of a prompt
CONTEXT = 128  # tokens before the ones that decode
PRODUCTS = ("int8", "bf16", "f32")
SUMS = ("seconds", "idle", "weight_bytes", "row_bytes", "macs")


def profile(
    model: str,
    *,
    rows: Sequence[int] = ROWS,
    rounds: int = 5,
    threads: int | None = None,
    say: Say = lambda line: None,
    done: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """The figures as they stand in the JSON: `isa`, `bandwidth_gb_s` and `gmacs` (of int8, bf16, f32), measured before; and in
    `steps` by rows of a step its `ms`, what of these lies `outside_ms` the core, and `phases` and `kernels`: lines of ms, idle
    ms, MB of weights or K and V, MB of rows, millions of products, all of one step, and `share`: of the time that memory or
    products would take at best.

    Up to 32 rows are one token of as many sequences, 256 a prompt; a step that is profiled follows others of its kind. Times
    are as the first thread sees them, idle ones the mean over all threads. Raises ValueError where the core is not there.
    """
    if rounds < 1 or not rows or min(rows) < 1:
        raise ValueError("a profile has at least one row and one round")
    llm = LLM(model, backend="native", threads=threads, enable_prefix_caching=False, speculate=None)
    try:
        program = llm.runner.target
        assert isinstance(program, NativeProgram)
        result = {**heading(llm.opened, rounds), **limits(threads or 0), "steps": {}}
        for count in rows:
            if count + CONTEXT + rounds >= llm.memory_plan.max_model_len:
                say(f"{count} rows are left out: the model takes {llm.memory_plan.max_model_len} positions")
                continue
            seconds = _run(llm, program, count, rounds)
            result["steps"][str(count)] = _step(program, count, rounds, seconds, result)
            done(result)
        return result
    finally:
        llm.close()


def limits(threads: int) -> dict[str, Any]:
    """What the machine can do with so many threads, measured now: memory read, and products in registers."""
    pool = thread_pool(threads)
    peaks = {products: max(core().dot_rate(pool, products, 20)) / 1e9 for products in PRODUCTS}
    peaks["bf16"] = max(peaks["bf16"], peaks["f32"])  # what no instruction multiplies in pairs is widened once for many rows
    bandwidth = median(core().read_bandwidth(pool, 256, 8)) / 1e9
    return {"isa": core().cpu_info()["isa"], "threads": pool.size, "bandwidth_gb_s": bandwidth, "gmacs": peaks}


def _run(llm: LLM, program: NativeProgram, rows: int, rounds: int) -> float:
    """Steps of so many rows with the profile on: their seconds."""
    rng, size = random.Random(rows), llm.model_config.vocab_size
    decodes = rows <= MOST_SEQUENCES
    params = SamplingParams(temperature=0.0, max_tokens=llm.memory_plan.max_model_len - CONTEXT, ignore_eos=True)
    seconds = 0.0
    program.core.clear_profile()
    for _ in range(1 if decodes else rounds + 1):
        count, length = (rows, CONTEXT) if decodes else (1, rows)
        requests = [llm.engine.add([rng.randrange(size) for _ in range(length)], params) for _ in range(count)]
        waiting = {request.id for request in requests}
        while waiting and decodes:
            waiting -= {delta.request_id for delta in llm.engine.step() if delta.token_ids}
        for number in range(rounds + 1 if decodes else 1):
            program.core.profiling = not decodes or number > 0
            start = time.perf_counter()
            llm.engine.step()
            seconds += (time.perf_counter() - start) * program.core.profiling
        program.core.profiling = False
        for request in requests:
            llm.engine.abort(request.id)
        while llm.engine.busy:
            llm.engine.step()
    return seconds


def _step(program: NativeProgram, rows: int, rounds: int, seconds: float, machine: dict[str, Any]) -> dict[str, Any]:
    entries = [entry for entry in program.core.profile if entry["step_rows"] == rows]
    steps = sum(entry["calls"] for entry in entries if entry["phase"] == "prepare")
    if not steps:
        raise ValueError(f"no step had {rows} rows; with --threads or fewer rows there may be memory for one")
    within = sum(entry["seconds"] for entry in entries)
    phases = [{"phase": entry["phase"], **_line([entry], steps, machine)} for entry in entries]
    kernels = [
        _line([entry for entry in entries if entry["kernel"] == kernel], steps, machine)
        for kernel in dict.fromkeys(entry["kernel"] for entry in entries)
        if kernel
    ]
    return {
        "ms": seconds / steps * 1e3,
        "outside_ms": (seconds - within) / steps * 1e3,
        "idle_ms": sum(entry["idle"] for entry in entries) / steps * 1e3,
        "phases": sorted(phases, key=lambda line: -line["ms"]),
        "kernels": sorted(kernels, key=lambda line: -line["ms"]),
    }


def _line(entries: Iterable[dict[str, Any]], steps: int, machine: dict[str, Any]) -> dict[str, Any]:
    """Entries of one kernel, together, a step's."""
    entries = list(entries)
    sums = {name: sum(entry[name] for entry in entries) / steps for name in SUMS}
    limit, share = share_of(machine, entries[0]["products"], sums["weight_bytes"], sums["macs"], sums["seconds"])
    return {
        "kernel": entries[0]["kernel"],
        "calls": sum(entry["calls"] for entry in entries) / steps,
        "ms": sums["seconds"] * 1e3,
        "idle_ms": sums["idle"] * 1e3,
        "weight_mb": sums["weight_bytes"] / 1e6,
        "row_mb": sums["row_bytes"] / 1e6,
        "mmacs": sums["macs"] / 1e6,
        "limit": limit,
        "share": share,
    }


def share_of(
    machine: dict[str, Any], products: str, weight_bytes: float, macs: float, seconds: float
) -> tuple[str, float | None]:
    """What bounds this work on the machine (`limits`), "memory" or the kind of products, and the share of the seconds that it
    would take at best; "" and None where nothing does."""
    reading = weight_bytes / (machine["bandwidth_gb_s"] * 1e9)
    multiplying = macs / (machine["gmacs"][products] * 1e9) if products else 0.0
    best = max(reading, multiplying)
    limit = "" if not best else "memory" if reading >= multiplying else products
    return limit, best / seconds if best and seconds else None
