"""Calibration of this machine for `headrace fit`: times of the core's kernels with random weights, without a model's files."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from statistics import median
from typing import Any

import numpy as np

import headrace
from headrace import core, host
from headrace.backends.native.program import NativeProgram, thread_pool
from headrace.bench.profile import limits
from headrace.data.config import CacheConfig, EngineConfig, LayerConfig, ModelConfig, RopeConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.kv.layout import PAGE, kv_shape
from headrace.models.registry import describe
from headrace.runner.runner import Runner
from headrace.startup.fit.headers import PlannedSource, planned
from headrace.startup.fit.machine import Attention, Curve, Machine, line_through
from headrace.weights.kinds import KINDS
from headrace.weights.schemes.rows import POINTS
from headrace.weights.sparse import INDICES, ZEROS

# Formats that every calibration measures.
COMMON = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "G4_128", "BF16")
ROWS = (1, 4, 8, 16, 32, 64, 512, 2048)
# Outputs and inputs of a small and of a large layer.
SHAPES = ((576, 576), (4096, 2048))
# Bytes of packed weights that a pass reads: more than a core's cache while reading is the limit, fewer for many rows.
READ, FEW = 96 << 20, 3 << 20
MANY_ROWS = 32
REPEATS = 5
# Head size, query heads and KV heads of the models whose attention is measured.
HEADS = ((64, 9, 3), (128, 12, 2))
# (sequences, rows of each, tokens before them).
DECODE = ((1, 1, 127), (8, 1, 127), (32, 1, 127), (1, 1, 4000))
PREFILL = ((1, 512, 0), (1, 512, 1536), (1, 2048, 0))
LAYERS = 8
Done = Callable[[], None]


class RandomSource(PlannedSource):
    """A source whose matrices are random bfloat16 and whose vectors are ones."""

    def raw(self, name: str) -> np.ndarray:
        info = self.info(name)
        if info.kind == "F32":
            return np.ones(info.shape, np.float32).reshape(info.rows, -1).view(np.uint8)
        return stored(info.kind, info.rows, info.shape[-1], np.random.default_rng(0))


def calibrate(threads: int = 0, kinds: Sequence[str] = (), done: Done = lambda: None) -> Machine:
    """Measure this machine in at most 20 s. kinds: formats besides the common ones. done: called after each of `parts`."""
    pool = thread_pool(threads)
    peaks = limits(threads)
    linear = {}
    for kind in dict.fromkeys((*COMMON, *kinds)):
        linear[kind] = measure_linear(kind, pool)
        done()
    attention, costs = [], []
    for dim, heads, kv_heads in HEADS:
        for kv_dtype in ("bfloat16", "int8", "int4"):
            measured, rest = measure_attention(dim, heads, kv_heads, kv_dtype, threads)
            attention.append(measured)
            costs.append(rest)
        done()
    quantize, embed, answers = (line_through([point for rest in costs for point in rest[name]]) for name in REST)
    day = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Machine(
        name=f"{host.cpu_name()}, {pool.size} threads",
        memory=host.physical_memory(),
        bandwidth=peaks["bandwidth_gb_s"] * 1e9,
        peak={name: 2e9 * gmacs for name, gmacs in peaks["gmacs"].items() if name in ("int8", "bf16")},
        # Between hosts over 10 Gbit/s Ethernet; not measured.
        link=(50e-6, 1.2e9),
        measured=f"{day}, Headrace {headrace.__version__}",
        threads=pool.size,
        linear=linear,
        attention=tuple(attention),
        quantize=quantize,
        embed=embed,
        answers=answers,
        host=measure_host(threads),
    )


def parts(kinds: Sequence[str] = ()) -> int:
    """Number of calls of `done`."""
    return len(dict.fromkeys((*COMMON, *kinds))) + len(HEADS)


def measure_linear(kind: str, pool: Any) -> Curve:
    """Seconds of a layer by rows: a fixed part and one for each packed byte, from a small and a large layer."""
    rng, module = np.random.default_rng(0), core.module()
    times: list[list[tuple[float, float]]] = [[] for _ in ROWS]
    for n, k in SHAPES:
        if k % KINDS[kind].block:
            k = -(-k // 256) * 256
        arena, layers, rows = module.Arena(), list[Any](), stored(kind, n, k, rng)
        while not layers or arena.used < READ:
            layers.append(module.PackedLinear([module.pack(rows, kind, n, k, arena, pool)]))
        size = arena.used / len(layers)
        for at, count in enumerate(ROWS):
            x = rng.standard_normal((count, k)).astype(np.float32)
            some = layers if count <= MANY_ROWS else layers[: max(1, int(FEW / size))]
            module.time_linears(some, x, pool, 1)
            times[at].append((size, median(module.time_linears(some, x, pool, REPEATS)) / len(some)))
    lines = [line_through(points) for points in times]
    return Curve(ROWS, tuple(fixed for fixed, _ in lines), tuple(each for _, each in lines))


def stored(kind: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Random packed rows [n, bytes] uint8: normal bfloat16, or blocks with finite scales, as no byte is above 0x3b."""
    # Random bits would contain subnormal numbers, which some processors multiply a hundred times slower.
    if kind == "BF16":
        return rng.standard_normal((n, k)).astype(np.float32).view(np.uint16)[:, 1::2].copy().view(np.uint8)
    block, block_bytes = KINDS[kind]
    rows = rng.integers(0, 256, (n, k // block, block_bytes), np.uint8) & 0x3B
    if kind in ZEROS:
        rows[:, :, 2:6] = INDICES[rng.integers(0, 6, (n, k // block, 4))] | INDICES[rng.integers(0, 6, (n, k // block, 4))] << 4
    if kind in POINTS:
        rows[:, :, 2] &= 15
    return rows.reshape(n, -1)


REST = ("quantize", "embed", "answers")
Points = dict[str, list[tuple[float, float]]]


def measure_attention(dim: int, heads: int, kv_heads: int, kv_dtype: str, threads: int) -> tuple[Attention, Points]:
    """Times of attention, and points (numbers, seconds) of quantizing, embedding and sampling, from a program of LAYERS layers.

    Steps begin at any position of the pool: its content does not change the times.
    """
    program = _program(dim, heads, kv_heads, kv_dtype, threads, LAYERS)
    kv_bytes = kv_shape(program.config).native_block_bytes(PAGE, kv_dtype) / PAGE / LAYERS
    points: Points = {name: [] for name in REST}
    decode, prefill = [], []
    with closing(program):
        for batch, rows, past in (*DECODE, *PREFILL):
            entries = _profiled(program, batch, rows, past)
            seconds = entries["attention"] / LAYERS
            if rows == 1:
                decode.append((batch, batch * (past + 1) * kv_bytes, seconds))
            else:
                prefill.append((rows * heads * dim, 2 * rows * (past + (rows + 1) / 2) * heads * dim, seconds))
            hidden, tokens = program.config.hidden_size, batch * rows
            if tokens * hidden > 32 * 64:
                points["quantize"].append((float(tokens * hidden), entries["quantize"] / (2 * LAYERS)))
            points["embed"].append((float(tokens * hidden), entries["embed"]))
            points["answers"].append((float(batch * program.config.vocab_size), entries["answers"] + entries["prepare"]))
    row, product = line_of_two([(macs, seconds / numbers, numbers) for numbers, macs, seconds in prefill])
    return Attention(dim, heads // kv_heads, kv_dtype, _plane(decode), (row, product)), points


def line_of_two(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """seconds = row · numbers + product · macs, by the ratio to numbers: (row, product)."""
    return line_through([(macs / numbers, seconds) for macs, seconds, numbers in points])


def _plane(points: Sequence[tuple[int, float, float]]) -> tuple[float, float, float]:
    """seconds = call + sequence · batch + byte · bytes: of the calls that fit best, the bytes by the longest context."""
    best = (math.inf, (0.0, 0.0, 0.0))
    longest = max(points, key=lambda point: point[1] / point[0])
    for share in range(41):
        byte = share / 40 * longest[2] / longest[1]
        call, sequence = line_through([(batch, max(seconds - byte * size, 1e-9)) for batch, size, seconds in points])
        error = sum(((call + sequence * batch + byte * size) / seconds - 1) ** 2 for batch, size, seconds in points)
        best = min(best, (error, (call, sequence, byte)))
    return best[1]


def _program(dim: int, heads: int, kv_heads: int, kv_dtype: str, threads: int, layers: int) -> NativeProgram:
    """A program of small random layers with these heads; its pool holds 32 contexts of 128 tokens, or one of 4,096."""
    layer = LayerConfig(heads=heads, kv_heads=kv_heads, head_dim=dim, ffn=64, rope=RopeConfig())
    config = ModelConfig("llama", 32768, heads * dim, (layer,) * layers, 8192)
    source = planned(config, "Q8_0")
    random = RandomSource(source.path, source.format, source.config, source.tensors)
    return NativeProgram(
        describe(config), random, num_blocks=512, block_size=16, max_positions=8192, kv_dtype=kv_dtype, threads=threads
    )


def _profiled(program: NativeProgram, batch: int, rows: int, past: int) -> dict[str, float]:
    """Median seconds of each phase of a step, all calls together."""
    module, found = core.module(), list[dict[str, float]]()
    blocks = -(-(past + rows) // 16)
    sequences = []
    for number in range(batch):
        sequence = module.Sequence([number + 1] * (past + rows), module.SampleParams())
        sequence.set_table(0, 0, list(range(number * blocks, (number + 1) * blocks)))
        sequences.append(sequence)
    for number in range(REPEATS + 1 if batch * rows <= MANY_ROWS else 3):
        step = module.Step()
        if rows == 1:
            step.draw_each(sequences, [past] * batch)
        else:
            step.feed(sequences[0], past, rows, 1)
            step.draw(0, [(0, 0)])
        program.core.profiling = number > 0
        program.core.run(step)
        sums: dict[str, float] = {}
        for entry in program.core.profile:
            sums[entry["phase"]] = sums.get(entry["phase"], 0.0) + entry["seconds"]
        program.core.clear_profile()
        if number:
            found.append(sums)
    program.core.profiling = False
    return {name: median(sums[name] for sums in found) for name in found[0]}


def measure_host(threads: int) -> tuple[float, float]:
    """Seconds of a step outside the core: of a step, and of each sequence."""
    points = []
    with closing(_program(64, 1, 1, "auto", threads, 1)) as program:
        scheduler = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=2048)
        engine = Engine(InProcess(Runner(program)), EngineConfig(scheduler, CacheConfig(512, 16, False)), vocab_size=32768)
        params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
        for batch in (1, 8, 32):
            requests = [engine.add([1 + at] * 16, params) for at in range(batch)]
            for _ in range(4):
                engine.step()
            program.core.profiling = True
            times = []
            for _ in range(24):
                program.core.clear_profile()
                start = time.perf_counter()
                engine.step()
                whole = time.perf_counter() - start
                times.append(whole - sum(entry["seconds"] for entry in program.core.profile))
            program.core.profiling = False
            points.append((float(batch), median(times)))
            for request in requests:
                engine.abort(request.id)
            while engine.busy:
                engine.step()
    return line_through(points)
