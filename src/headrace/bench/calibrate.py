"""Calibration of this machine for `headrace fit`: times of the core's kernels with random weights, without a model's files."""

import math
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from statistics import mean, median, median_low
from tempfile import TemporaryFile
from typing import Any

import msgspec
import numpy as np

import headrace
from headrace import core, host
from headrace.backends.native.program import NativeProgram, thread_pool
from headrace.bench.profile import limits
from headrace.data.config import CacheConfig, EngineConfig, LayerConfig, ModelConfig, RopeConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.kv.layout import PAGE, KVShape
from headrace.models.registry import describe
from headrace.runner.runner import Runner
from headrace.startup.fit.costs import HOST, LOCAL_COLUMNS, Step, timed
from headrace.startup.fit.headers import PlannedSource, planned
from headrace.startup.fit.machine import Attention, Curve, Machine, line_through
from headrace.startup.fit.shapes import shape_of
from headrace.weights.kinds import KINDS
from headrace.weights.schemes.rows import POINTS
from headrace.weights.sparse import INDICES, ZEROS
from headrace.weights.store import home

# Formats that every calibration measures.
COMMON = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "BF16")
ROWS = (1, 4, 8, 16, 32, 64, 512)
# Outputs and inputs of a small and of a large layer.
SHAPES = ((576, 576), (4096, 2048))
# Bytes of packed weights that passes of up to MANY_ROWS rows read: within a large cache, and from memory; of more rows.
CACHED, MEMORY, FEW = 32 << 20, 320 << 20, 3 << 20
# Format whose layers show what reading from memory adds, with how many rows, and the bytes between which the cache ends.
PROBE = "Q4_K"
MEMORY_ROWS = (4, 8, 16, 32)
SIZES = tuple(mebibytes << 20 for mebibytes in (64, 96, 128, 160, 192, 224, 256))
MANY_ROWS = 32
REPEATS, SWEEPS = 2, 3
# Bytes of the file that is read from disk, and of one call.
ON_DISK, PIECE = 256 << 20, 4 << 20
# Rows of a long step, and from which products take longer than reading.
LONG, PRODUCTS = 512, 16
# Seconds for which a measured pace counts.
FRESH = 0.15
# Seconds that repeated passes take at least.
SHORT = 0.012
# Head size, query heads and KV heads of the models whose attention is measured.
HEADS = ((64, 9, 3), (128, 12, 2))
# (sequences, rows of each, tokens before them).
DECODE = ((1, 1, 127), (8, 1, 127), (32, 1, 127), (1, 1, 4000))
PREFILL = ((1, 512, 0), (1, 2048, 0))
LAYERS = 4
# Steps of the host that are measured, and the bytes of weights that are read before each.
HOST_STEPS, HOST_BYTES = 8, 96 << 20
# Heads and formats of K and V that are measured.
MEASURED = ((HEADS[0], "bfloat16"), *((HEADS[1], kv_dtype) for kv_dtype in ("bfloat16", "int8", "int4")))
# Scales at the beginning of a block of random bytes with which weights have variance 1; Q4_K's second one removes the mean.
SCALES = {"Q8_0": (1 / 74,), "Q4_K": (1 / 128, 1 / 32)}
# Format of the weights of programs whose attention is measured.
ATTENTION_KIND = "Q8_0"
# Whole models, by heads and width of the MLP, whose steps are compared with the sums of their operations.
WHOLE, WHOLE_KIND, WHOLE_LAYERS, VOCABULARY = ((HEADS[0], 1536), (HEADS[1], 4096)), "Q4_K", 4, 8192
WHOLE_STEPS = ((1, 1, 127), (4, 1, 127), (8, 1, 127), (32, 1, 127), (1, 512, 0))
# Phases whose time depends on the numbers that they read.
REST = ("quantize", "embed", "answers")
Points = dict[str, list[tuple[float, float]]]
Done = Callable[[], None]
# Names of measurements and their seconds.
Times = Iterator[tuple[Any, float]]


class RandomSource(PlannedSource):
    """A source whose vectors are ones, and whose matrices are random: of inputs with variance 1 they make outputs with about 1.

    Attention needs such values. Scores of large ones underflow in the softmax, which takes up to twice the time.
    """

    def raw(self, name: str) -> np.ndarray:
        info = self.info(name)
        if info.kind == "F32":
            return np.ones(info.shape, np.float32).reshape(info.rows, -1).view(np.uint8)
        return unit_rows(info.kind, info.rows, info.shape[-1])


def unit_rows(kind: str, n: int, k: int) -> np.ndarray:
    """Random packed rows [n, bytes] uint8 of BF16, Q8_0 or Q4_K, of mean 0 and variance 1 / k."""
    rng, scale = np.random.default_rng(0), k**-0.5
    if kind == "BF16":
        return (scale * rng.standard_normal((n, k))).astype(np.float32).view(np.uint16)[:, 1::2].copy().view(np.uint8)
    rows = stored(kind, n, k, rng).reshape(n, -1, KINDS[kind].nbytes)
    if kind == "Q8_0":
        rows[:, :, 2:] = rng.integers(0, 256, rows[:, :, 2:].shape, np.uint8)
    scales = (np.array(SCALES[kind]) * scale).astype(np.float16).view(np.uint8)
    rows[:, :, : len(scales)] = scales
    return rows.reshape(n, -1)


def calibrate(threads: int = 0, kinds: Sequence[str] = COMMON, done: Done = lambda: None) -> Machine:
    """Measure this machine in about 20 s. kinds: formats of weights. done: called after each of `SWEEPS` sweeps.

    Each sweep measures everything once, so that a slow drift of the machine spreads over all figures; the lower median counts.
    """
    pool = thread_pool(threads)
    linears = {kind: [Layers(kind, *shape, CACHED, pool) for shape in SHAPES] for kind in dict.fromkeys((*kinds, WHOLE_KIND))}
    probe = Layers(PROBE, *SHAPES[1], MEMORY, pool)
    with ExitStack() as stack:
        programs = {
            (*heads, kv_dtype): stack.enter_context(closing(_program(*heads, kv_dtype, pool.size, LAYERS, kind=ATTENTION_KIND)))
            for heads, kv_dtype in MEASURED
        }
        engine, program = _engine(stack, pool.size)
        whole = [stack.enter_context(closing(_program(*heads, "auto", pool.size, WHOLE_LAYERS, ffn))) for heads, ffn in WHOLE]
        samples: dict[Any, list[float]] = defaultdict(list)
        pace = Pace(linears[WHOLE_KIND][1])
        for _ in range(SWEEPS):
            for name, seconds in chain(
                _linear_times(linears),
                _memory_times(probe),
                *(_attention_times(key, each) for key, each in programs.items()),
                _host_times(engine, program, probe),
                *map(_whole_times, whole),
            ):
                samples[name].append(seconds / pace.now(name))
            done()
        times = {name: median_low(ratios) * pace.usual(name) for name, ratios in samples.items()}
        machine = _machine(pool, times, linears, probe)
        return msgspec.structs.replace(machine, program=_factors(whole, machine, times))


def _machine(pool: Any, times: dict[Any, float], linears: dict[str, list["Layers"]], probe: "Layers") -> Machine:
    """The machine of the measured times."""
    peaks = limits(pool.size)
    linear = {}
    for kind, pair in linears.items():
        lines = [line_through([(each.size, times[kind, each.size, rows]) for each in pair]) for rows in ROWS]
        linear[kind] = Curve(ROWS, tuple(fixed for fixed, _ in lines), tuple(byte for _, byte in lines))
    edge = (times["memory", CACHED] + times["memory", MEMORY]) / 2
    cache = max(size for size in (CACHED, *SIZES) if size == CACHED or times["memory", size] < edge)
    rest = {name: [(key[1], seconds) for key, seconds in times.items() if key[0] == name] for name in (*REST, "host")}
    day = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Machine(
        name=f"{host.cpu_model()}, {pool.size} threads",
        memory=host.physical_memory(),
        bandwidth=peaks["bandwidth_gb_s"] * 1e9,
        peak={name: 2e9 * gmacs for name, gmacs in peaks["gmacs"].items() if name in ("int8", "bf16")},
        # Between hosts over 10 Gbit/s Ethernet; not measured.
        link=(50e-6, 1.2e9),
        measured=f"{day}, Headrace {headrace.__version__}",
        threads=pool.size,
        linear=linear,
        from_memory=times["memory", MEMORY] / probe.size,
        apart=_apart(times, probe, linear[PROBE]),
        cache=cache,
        attention=tuple(_attention(times, *heads, kv_dtype) for heads, kv_dtype in MEASURED),
        quantize=line_through(rest["quantize"]),
        embed=line_through(rest["embed"]),
        answers=line_through(rest["answers"]),
        host=line_through(rest["host"]),
        disk=_disk_speed(home()),
    )


def _apart(times: dict[Any, float], probe: "Layers", curve: Curve) -> Curve:
    """Share of the shorter of reading and multiplying that a layer takes in addition to the longer, by rows."""
    read, shares = times["memory", MEMORY], [0.0]
    for rows in MEMORY_ROWS:
        multiplying = curve.seconds(rows, probe.size)
        more = times["reading", rows] - max(read, multiplying)
        shares.append(min(1.0, max(0.0, more / min(read, multiplying))))
    return Curve((1, *MEMORY_ROWS), tuple(shares), (0.0,) * len(shares))


def _disk_speed(folder: Path) -> float:
    """Bytes/s of reading a file of this folder in large pieces; 0 if its files are in memory or it has no space."""
    folder.mkdir(parents=True, exist_ok=True)
    if host.in_memory(folder) or shutil.disk_usage(folder).free < 2 * ON_DISK:
        return 0.0
    piece = bytearray(PIECE)
    with TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(ON_DISK // PIECE):
            file.write(piece)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        start = time.perf_counter()
        while file.readinto(piece):
            pass
        return ON_DISK / (time.perf_counter() - start)


def _whole_times(program: NativeProgram) -> Times:
    """Times of steps of a whole model."""
    for batch, rows, past in WHOLE_STEPS:
        name = ("whole", batch, rows, program.config.hidden_size)
        yield name, _profiled(program, batch, rows, past, whole=True)["whole"]


def _factors(programs: Sequence[NativeProgram], machine: Machine, times: dict[Any, float]) -> Curve:
    """Times of steps of whole models divided by the sums of their operations, by rows: what barriers and cold caches add."""
    factors = []
    for batch, rows, past in WHOLE_STEPS:
        step, ratios = Step(rows, batch, past, batch), []
        for program in programs:
            every = timed(shape_of(program.config, program.weights.source, "whole"), step, machine)
            alone = sum(each.seconds for each in every if each.operation.kind != HOST)
            ratios.append(times["whole", batch, rows, program.config.hidden_size] / alone)
        factors.append(mean(ratios))
    return Curve(tuple(batch * rows for batch, rows, _ in WHOLE_STEPS), tuple(factors), (0.0,) * len(factors))


class Layers:
    """Equal linear layers of at least `least` packed bytes together. size: bytes of one."""

    def __init__(self, kind: str, n: int, k: int, least: int, pool: Any) -> None:
        module, columns = core.module(), -(-k // KINDS[kind].block) * KINDS[kind].block
        rows, arena = stored(kind, n, columns, np.random.default_rng(0)), module.Arena()
        self.pool, self.columns = pool, columns
        self.layers: list[Any] = []
        while not self.layers or arena.used < least:
            self.layers.append(module.PackedLinear([module.pack(rows, kind, n, columns, arena, pool)]))
        self.size = arena.used / len(self.layers)

    def seconds(self, rows: int, nbytes: int) -> float:
        """Seconds of one layer in passes over `nbytes` bytes of them."""
        some = self.layers[: max(1, int(nbytes / self.size))]
        x = np.random.default_rng(0).standard_normal((rows, self.columns)).astype(np.float32)
        (once,) = core.module().time_linears(some, x, self.pool, 1)
        # Short passes are repeated until the threads are awake and the clock is up.
        repeats = max(REPEATS, min(16, int(SHORT / once)))
        return float(median(core.module().time_linears(some, x, self.pool, repeats))) / len(some)

    def read(self, nbytes: int) -> None:
        """Read `nbytes` bytes of the layers, which replace what the caches have."""
        x = np.zeros((1, self.columns), np.float32)
        core.module().time_linears(self.layers[: int(nbytes / self.size)], x, self.pool, 1)


class Pace:
    """Speed of the machine while it is calibrated, as the time of one layer: with one row (reading), or with many (products).

    The clock changes within a second. Each measurement is divided by the time of the layer next to it, and multiplied by the
    layer's median time at the end, so that all figures are of the same speed.
    """

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.times: dict[int, list[float]] = {1: [], LONG: []}
        self._last: dict[int, tuple[float, float]] = {}

    def now(self, name: tuple[Any, ...]) -> float:
        """Time of the layer after the measurement `name`; 1 for measurements that are not of the cores."""
        if not (rows := self._rows(name)):
            return 1.0
        at, seconds = self._last.get(rows, (0.0, 0.0))
        if time.perf_counter() - at > FRESH:
            seconds = self.layers.seconds(rows, CACHED if rows == 1 else FEW)
            self.times[rows].append(seconds)
            self._last[rows] = time.perf_counter(), seconds
        return seconds

    def usual(self, name: tuple[Any, ...]) -> float:
        """Median time of the layer that `now` divided by."""
        rows = self._rows(name)
        return median(self.times[rows]) if rows else 1.0

    def _rows(self, name: tuple[Any, ...]) -> int:
        """Rows of the layer that is compared with a measurement; 0: none, for reads from memory."""
        if name[0] == "memory" or (name[0] == "reading" and name[1] < PRODUCTS):
            return 0
        rows = {
            "reading": lambda: name[1],
            "attention": lambda: name[2][0] * name[2][1],
            "whole": lambda: name[1] * name[2],
        }.get(name[0])
        fed = rows() if rows else name[2] if len(name) == 3 else 1
        return LONG if fed >= PRODUCTS else 1


def _linear_times(linears: dict[str, list[Layers]]) -> Times:
    for kind, pair in linears.items():
        for each in pair:
            for rows in ROWS:
                yield (kind, each.size, rows), each.seconds(rows, CACHED if rows <= MANY_ROWS else FEW)


def _memory_times(probe: Layers) -> Times:
    """Times of a layer in passes over weights that fit in the cache, and that do not."""
    for size in (CACHED, *SIZES, MEMORY):
        yield ("memory", size), probe.seconds(1, size)
    for rows in MEMORY_ROWS:
        yield ("reading", rows), probe.seconds(rows, MEMORY)


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
    if kind == "C8":  # one scale a row
        rows[:, :, :2] = rows[:, :1, :2]
    return rows.reshape(n, -1)


def _attention_times(key: tuple[Any, ...], program: NativeProgram) -> Times:
    """Times of attention, and of quantizing, embedding and sampling by the numbers that they read.

    Steps begin at any position of the pool: its content does not change the times.
    """
    for batch, rows, past in (*DECODE, *PREFILL):
        entries = _profiled(program, batch, rows, past)
        yield ("attention", key, (batch, rows, past)), entries["attention"] / LAYERS
        numbers = batch * rows * program.config.hidden_size
        if numbers > LOCAL_COLUMNS:
            yield ("quantize", numbers), entries["quantize"] / (2 * LAYERS)
        yield ("embed", numbers), entries["embed"]
        yield ("answers", batch * program.config.vocab_size), entries["answers"] + entries["prepare"]


def _attention(times: dict[Any, float], dim: int, heads: int, kv_heads: int, kv_dtype: str) -> Attention:
    """Lines through the times of one shape of heads."""
    byte = KVShape(1, kv_heads, dim).native_block_bytes(PAGE, kv_dtype) / PAGE
    key = (dim, heads, kv_heads, kv_dtype)
    decode = [(b, b * (past + 1) * byte, times["attention", key, (b, 1, past)]) for b, _, past in DECODE]
    width, prefill = heads * dim, []
    for _, rows, past in PREFILL:
        # Products and seconds of one number of the rows.
        prefill.append((2 * (past + (rows + 1) / 2), times["attention", key, (1, rows, past)] / (rows * width)))
    return Attention(dim, heads // kv_heads, kv_dtype, _plane(decode), line_through(prefill))


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


def _program(
    dim: int, heads: int, kv_heads: int, kv_dtype: str, threads: int, layers: int, ffn: int = 64, kind: str = WHOLE_KIND
) -> NativeProgram:
    """A program of random layers with these heads; its pool holds 32 contexts of 128 tokens, or one of 4,096."""
    layer = LayerConfig(heads=heads, kv_heads=kv_heads, head_dim=dim, ffn=ffn, rope=RopeConfig())
    config = ModelConfig("llama", VOCABULARY, heads * dim, (layer,) * layers, 8192)
    source = planned(config, kind)
    random = RandomSource(source.path, source.format, source.config, source.tensors)
    return NativeProgram(
        describe(config), random, num_blocks=512, block_size=16, max_positions=8192, kv_dtype=kv_dtype, threads=threads
    )


def _profiled(program: NativeProgram, batch: int, rows: int, past: int, whole: bool = False) -> dict[str, float]:
    """Median seconds of each phase of a step, all calls together; with `whole` those of the step, without a profile."""
    module, found = core.module(), list[dict[str, float]]()
    blocks = -(-(past + rows) // 16)
    tokens = np.random.default_rng(0).integers(0, program.config.vocab_size, (batch, past + rows)).tolist()
    greedy, sequences = module.SampleParams(), []
    greedy.temperature = 0.0
    for number in range(batch):
        sequence = module.Sequence(tokens[number], greedy)
        sequence.set_table(0, 0, list(range(number * blocks, (number + 1) * blocks)))
        sequences.append(sequence)
    first = 0 if rows > LONG else 1  # long steps need no warm-up
    for number in range(first + (1 if rows > LONG else REPEATS + 3 * (rows == 1))):
        step = module.Step()
        if rows == 1:
            step.draw_each(sequences, [past] * batch)
        else:
            step.feed(sequences[0], past, rows, 1)
            step.draw(0, [(0, 0)])
        program.core.profiling = number >= first and not whole
        start = time.perf_counter()
        program.core.run(step)
        sums = defaultdict(float, whole=time.perf_counter() - start)
        for entry in program.core.profile:
            sums[entry["phase"]] += entry["seconds"]
        program.core.clear_profile()
        if number >= first:
            found.append(sums)
    program.core.profiling = False
    return {name: median(sums[name] for sums in found) for name in found[0]}


def _engine(stack: ExitStack, threads: int) -> tuple[Engine, NativeProgram]:
    """An engine around a program of one small layer, whose steps are mostly the host's time."""
    program = stack.enter_context(closing(_program(64, 1, 1, "auto", threads, 1)))
    scheduler = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=2048)
    config = EngineConfig(scheduler, CacheConfig(512, 16, prefix_caching=False))
    return Engine(InProcess(Runner(program)), config, vocab_size=program.config.vocab_size), program


def _host_times(engine: Engine, program: NativeProgram, probe: "Layers") -> Times:
    """Seconds of a step outside the core, by the number of sequences.

    Weights are read before each step, as the step before does: what Python needs then is no longer in the cache.
    """
    params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
    for batch in (1, 8, 32):
        requests = [engine.add([1 + at] * 16, params) for at in range(batch)]
        for _ in range(4):
            engine.step()
        program.core.profiling = True
        times = []
        for _ in range(HOST_STEPS):
            probe.read(HOST_BYTES)
            program.core.clear_profile()
            start = time.perf_counter()
            engine.step()
            whole = time.perf_counter() - start
            times.append(whole - sum(entry["seconds"] for entry in program.core.profile))
        program.core.profiling = False
        yield ("host", batch), median(times)
        for request in requests:
            engine.abort(request.id)
        while engine.busy:
            engine.step()
