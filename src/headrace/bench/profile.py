"""Profile of the native core: time, bytes and products of each phase and kernel of a step, and its share of the limit."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from headrace import core
from headrace.backends.native.program import NativeProgram, thread_pool
from headrace.bench.competitors import heading
from headrace.bench.figures import Column, Table
from headrace.bench.machine import Say
from headrace.data.params import SamplingParams
from headrace.llm import LLM

ROWS = (1, 4, 8, 16, 32, 256)
# More rows than this are the tokens of one prompt; fewer are one token each of as many sequences.
MOST_SEQUENCES = 32
# Tokens of context of each decoding sequence.
CONTEXT = 128
PRODUCTS = ("int8", "bf16", "f32")
SUMS = ("seconds", "idle", "weight_bytes", "row_bytes", "macs")
COLUMNS = (
    Column("rows", "{rows}"),
    Column("phase", "{phase}"),
    Column("ms", "{ms:.3f}"),
    Column("idle", "{idle_ms:.3f}"),
    Column("weights MB", "{weight_mb:.2f}"),
    Column("rows MB", "{row_mb:.2f}"),
    Column("MMAC", "{mmacs:.1f}"),
    Column("of limit", lambda row: None if row["share"] is None else f"{row['share']:.0%} {row['limit']}"),
    Column("kernel", "{kernel}"),
)


def profile(
    model: str,
    *,
    rows: Sequence[int] = ROWS,
    rounds: int = 5,
    threads: int | None = None,
    say: Say = lambda line: None,
    done: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Content of the JSON file: the machine's `limits`, and in `steps` by number of rows the figures of one step.

    A step has `ms`, `outside_ms` (outside the core), and `phases` and `kernels`: lines with ms, idle ms, MB of weights or K and
    V, MB of rows, millions of products, and `share`: least possible time on this machine divided by the time.
    Times are those of the first thread, idle times the mean over all threads. Profiled steps follow unprofiled ones of the same
    kind. Raises ValueError if the core is missing.
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
    """Measure this machine's limits with `threads` threads: memory read bandwidth (GB/s), products in registers (GMAC/s)."""
    pool = thread_pool(threads)
    peaks = {products: max(core.module().dot_rate(pool, products, 20)) / 1e9 for products in PRODUCTS}
    # Without an instruction for pairs of bfloat16 the weights are widened to float32 once for many rows.
    peaks["bf16"] = max(peaks["bf16"], peaks["f32"])
    bandwidth = median(core.module().read_bandwidth(pool, 256, 8)) / 1e9
    return {"isa": core.module().cpu_info()["isa"], "threads": pool.size, "bandwidth_gb_s": bandwidth, "gmacs": peaks}


def _run(llm: LLM, program: NativeProgram, rows: int, rounds: int) -> float:
    """Run `rounds` profiled steps of `rows` rows; returns their seconds."""
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
    """Sums over entries of one kernel, per step."""
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
    """What limits work on the machine (`limits`), and the least possible time divided by `seconds`.

    The limit is "memory" or a kind of products; without bytes and products it is "" and the share None.
    """
    reading = weight_bytes / (machine["bandwidth_gb_s"] * 1e9)
    multiplying = macs / (machine["gmacs"][products] * 1e9) if products else 0.0
    best = max(reading, multiplying)
    limit = "" if not best else "memory" if reading >= multiplying else products
    return limit, best / seconds if best and seconds else None


def printed(result: dict[str, Any]) -> list[Table | str]:
    """Table and lines of the terminal."""
    lines = []
    for rows, step in result["steps"].items():
        lines += [{"rows": rows, **line} for line in step["phases"]]
        lines += [{"rows": rows, "phase": "all of", **line} for line in step["kernels"]]
    peaks = ", ".join(f"{products} {gmacs:.0f}" for products, gmacs in result["gmacs"].items())
    return [
        Table(COLUMNS, lines),
        "",
        *(
            f"{rows} rows: {step['ms']:.3f} ms a step, {step['idle_ms']:.3f} idle, {step['outside_ms']:.3f} outside the core"
            for rows, step in result["steps"].items()
        ),
        f"{result['isa']}, {result['threads']} threads: memory read at {result['bandwidth_gb_s']:.1f} GB/s, "
        f"products at most {peaks} GMAC/s",
    ]
