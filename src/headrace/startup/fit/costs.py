"""Time of a step: its operations with their bytes and products, and what a machine needs for them (roofline)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.kv.layout import PAGE
from headrace.startup.fit.machine import EFFICIENCY, Machine
from headrace.startup.fit.shapes import LayerShape, Linear, ModelShape
from headrace.startup.fit.sizes import ONE, Layout, heads_of, layer_counts, weights_of

LINEAR, ATTENTION, STATE, QUANTIZE, EMBED, ANSWERS, EXCHANGE, HOST = (
    *("linear", "attention", "state", "quantize", "embed", "answers", "exchange", "host"),
)
# Columns that a thread quantizes for itself, within a linear layer's own time (csrc/program/buffers.h).
LOCAL_COLUMNS = 32 * 64


@dataclass(frozen=True, slots=True)
class Step:
    """`batch` sequences that feed `rows` tokens each after `past` ones. logits: rows of the head, one each if None."""

    rows: int
    batch: int = 1
    past: int = 0
    logits: int | None = None
    kv_dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        return self.rows * self.batch

    @property
    def head_rows(self) -> int:
        return self.batch if self.logits is None else self.logits

    def seen(self, window: int | None) -> float:
        """Pairs of a query and a key, of one sequence."""
        if window is None or self.past + self.rows <= window:
            return self.rows * (self.past + (self.rows + 1) / 2)
        # Row i sees min(past + i + 1, window) keys.
        short = max(0, window - self.past)
        return short * (self.past + (short + 1) / 2) + (self.rows - short) * window


@dataclass(frozen=True, slots=True)
class Operation:
    """Equal calls of one kind. nbytes, operations, rows, columns: of one call. parts: bytes by weight format.

    nbytes: weights or K/V read. operations: 2 for a product. columns: numbers of a row. layer: of attention.
    """

    name: str
    kind: str
    calls: int
    nbytes: float
    operations: float
    rows: int
    columns: int
    parts: tuple[tuple[str, float], ...] = ()
    layer: LayerShape | None = None
    heads: int = 0


@dataclass(frozen=True, slots=True)
class Timed:
    """An operation with its time in seconds, all calls together, and what limits it: memory, products or overhead."""

    operation: Operation
    seconds: float
    limit: str


def operations(shape: ModelShape, step: Step, layout: Layout = ONE, rank: int = 0, stage: int = 0) -> list[Operation]:
    """The operations of a step on one rank, in order of the model; equal ones are counted together."""
    counts: Counter[Operation] = Counter()
    inside, last = layer_counts(shape, layout, stage), stage == layout.pp - 1
    for layer, count in inside:
        for operation in _layer(shape, layer, step, layout.tp, rank):
            counts[operation] += count
    if stage == 0:
        table = shape.tables[0]
        bits = table.nbytes / max(1, table.outputs)
        counts[Operation("embed", EMBED, 1, bits * step.tokens, 0, step.tokens, shape.hidden)] += 1
    if last and step.head_rows:
        counts[_rows(QUANTIZE, "quantize", step.head_rows, shape.hidden)] += 1
        counts[_linear(shape.head, None, step.head_rows, layout.tp, rank, name="head")] += 1
        counts[_rows(ANSWERS, "answers", step.head_rows, shape.vocab_size)] += 1
    counts[Operation("host", HOST, 1, 0, 0, step.batch, 0)] += 1
    if layout.tp > 1:
        exchanges = 2 * sum(count for _, count in inside) + 2 * last
        counts[Operation("exchange", EXCHANGE, 1, 4 * step.tokens * shape.hidden, 0, step.tokens, shape.hidden)] += exchanges
    elif layout.pp > 1 and stage:
        counts[Operation("exchange", EXCHANGE, 1, 4 * step.tokens * shape.hidden, 0, step.tokens, shape.hidden)] += 1
    return [_counted(operation, count) for operation, count in counts.items()]


def _counted(operation: Operation, calls: int) -> Operation:
    return Operation(
        *(operation.name, operation.kind, calls, operation.nbytes, operation.operations, operation.rows, operation.columns),
        *(operation.parts, operation.layer, operation.heads),
    )


def _rows(kind: str, name: str, rows: int, columns: int) -> Operation:
    return Operation(name, kind, 1, 0, 0, rows, columns)


def _layer(shape: ModelShape, layer: LayerShape, step: Step, tp: int, rank: int) -> Iterable[Operation]:
    yield _rows(QUANTIZE, "quantize", step.tokens, shape.hidden)
    yield _rows(QUANTIZE, "quantize", step.tokens, shape.hidden)
    for linear in layer.linears:
        if linear.name != "cross_kv":  # of the source, once
            yield _linear(linear, layer, step.tokens, tp, rank)
    if layer.heads:
        yield _attention(layer, step, tp, rank)
        if shape.source_positions:
            past = max(0, shape.source_positions - step.rows)
            yield replace(_attention(layer, replace(step, past=past), tp, rank), name="attention to sound")
    if layer.state_bytes:  # read and written
        state = 2 * layer.state_bytes * step.batch / tp
        yield Operation("state", STATE, 1, state, 0.75 * state * step.rows, step.rows, step.batch)


def _linear(linear: Linear, layer: LayerShape | None, rows: int, tp: int, rank: int, name: str = "") -> Operation:
    """A linear layer. Of experts the distinct ones that `rows` tokens choose are read, each by its share of the rows."""
    share = 1.0 if tp == 1 else weights_of(linear, layer, tp, rank) / linear.nbytes
    if linear.copies > 1:
        missed = (1 - linear.active / linear.copies) ** rows
        read = max(linear.active, linear.copies * (1 - missed)) / linear.copies
    else:
        read = 1.0
    parts: Counter[str] = Counter()
    for part in linear.parts:
        parts[part.label] += part.nbytes() * linear.copies * share * read  # type: ignore[assignment]
    per_call = max(1, round(rows * linear.active / (linear.copies * read)))
    return Operation(
        *(name or linear.name, LINEAR, 1, sum(parts.values()), 2.0 * linear.weights * rows * share),
        *(per_call, linear.inputs, tuple(sorted(parts.items()))),
    )


def _attention(layer: LayerShape, step: Step, tp: int, rank: int) -> Operation:
    heads, kv_heads = heads_of(layer, tp, rank)
    pairs = step.seen(layer.window) * step.batch
    tokens = min(step.past + step.rows, (layer.window or step.past) + step.rows) * step.batch
    # A layer that reads another's K/V reads as many bytes as its owner.
    nbytes = tokens * replace(layer, owns_kv=True).kv_bytes(step.kv_dtype, None if layer.latent else len(kv_heads)) / PAGE
    work = 2.0 * pairs * len(heads) * (layer.key_dim + layer.value_dim)
    return Operation("attention", ATTENTION, 1, nbytes, work, step.rows, step.batch, (), layer, len(heads))


def timed(shape: ModelShape, step: Step, machine: Machine, layout: Layout = ONE, rank: int = 0, stage: int = 0) -> list[Timed]:
    """Times of the operations of a step on one rank."""
    every = operations(shape, step, layout, rank, stage)
    read = _read(every)
    times = [_time(operation, step, machine, read) for operation in every]
    if machine.barriers:
        layers = sum(count for _, count in layer_counts(shape, layout, stage))
        barriers = Operation("barriers", EXCHANGE, layers, 0, 0, step.tokens, 0)
        times.append(Timed(barriers, layers * machine.barriers, "link"))
    return times


def bytes_read(shape: ModelShape, step: Step) -> float:
    """Bytes of weights, K/V and state that a step reads."""
    return _read(operations(shape, step))


def _read(every: Iterable[Operation]) -> float:
    return sum(each.calls * each.nbytes for each in every if each.kind in (LINEAR, ATTENTION, STATE))


def _time(operation: Operation, step: Step, machine: Machine, read: float) -> Timed:
    if operation.kind == EXCHANGE:
        latency, speed = machine.link
        return Timed(operation, operation.calls * (latency + operation.nbytes / speed), "link")
    if not machine.measured or operation.kind == STATE:
        return _roofline(operation, machine)
    seconds = operation.calls * {
        LINEAR: _measured_linear,
        ATTENTION: _measured_attention,
        QUANTIZE: _measured_quantize,
        EMBED: lambda each, *_: machine.embed[0] + machine.embed[1] * each.rows * each.columns,
        ANSWERS: lambda each, *_: machine.answers[0] + machine.answers[1] * each.rows * each.columns,
        HOST: lambda each, *_: machine.host[0] + machine.host[1] * each.rows,
    }[operation.kind](operation, step, machine)
    if operation.kind in (LINEAR, ATTENTION):
        seconds = machine.in_step(seconds, operation.calls * operation.nbytes, operation.rows, read)
    if operation.kind != HOST:
        seconds *= machine.factor(step.tokens)
    return Timed(operation, seconds, _limit(operation, machine))


def _roofline(operation: Operation, machine: Machine) -> Timed:
    """The longer of reading and multiplying, as published figures say: a lower bound of the time."""
    reading = operation.nbytes / machine.bandwidth
    multiplying = operation.operations / (EFFICIENCY * machine.speed("bf16"))
    return Timed(operation, operation.calls * max(reading, multiplying), _limit(operation, machine))


def _limit(operation: Operation, machine: Machine) -> str:
    if not operation.nbytes:
        return "overhead"
    return "memory" if operation.operations / operation.nbytes < machine.ridge(products_of(operation)) else "products"


def products_of(operation: Operation) -> str:
    """Number format in which an operation multiplies."""
    return "bf16" if operation.kind == ATTENTION or all(kind == "BF16" for kind, _ in operation.parts) else "int8"


def _measured_linear(operation: Operation, step: Step, machine: Machine) -> float:
    curves = [(machine.curve(kind), nbytes) for kind, nbytes in operation.parts]
    each = [(curve.seconds(operation.rows, 0), curve.seconds(operation.rows, nbytes)) for curve, nbytes in curves if curve]
    return max(fixed for fixed, _ in each) + sum(whole - fixed for fixed, whole in each)


def _measured_attention(operation: Operation, step: Step, machine: Machine) -> float:
    layer = operation.layer
    assert layer is not None
    like = machine.attention_like(layer.key_dim, layer.heads // max(layer.kv_heads, 1), step.kv_dtype)
    call, sequence, byte = like.decode
    decode = call + sequence * step.batch + byte * operation.nbytes
    if step.rows == 1:
        return decode
    row, product = like.prefill
    per_row = row * step.tokens * operation.heads * layer.key_dim
    return max(decode, per_row + product * operation.operations / 2)


def _measured_quantize(operation: Operation, step: Step, machine: Machine) -> float:
    columns = operation.rows * operation.columns
    return 0.0 if columns <= LOCAL_COLUMNS else machine.quantize[0] + machine.quantize[1] * columns


def step_seconds(shape: ModelShape, step: Step, machine: Machine, layout: Layout = ONE) -> float:
    """Time of one step through all stages, each as slow as its slowest rank."""
    return sum(stage_seconds(shape, step, machine, layout))


def stage_seconds(shape: ModelShape, step: Step, machine: Machine, layout: Layout = ONE) -> list[float]:
    """Time of a step in each stage."""
    return [
        max(sum(each.seconds for each in timed(shape, step, machine, layout, rank, stage)) for rank in range(layout.tp))
        for stage in range(layout.pp)
    ]


def prefill_seconds(
    shape: ModelShape, tokens: int, machine: Machine, chunk: int, kv_dtype: str = "bfloat16", layout: Layout = ONE
) -> float:
    """Time to the first token of a prompt, in steps of `chunk` tokens. Stages work on the chunks one after another:
    C chunks on p stages take C + p - 1 times the longest stage."""
    starts = range(0, tokens, chunk)
    steps = [Step(min(chunk, tokens - start), 1, start, int(start + chunk >= tokens), kv_dtype) for start in starts]
    if layout.pp == 1:
        return sum(step_seconds(shape, step, machine, layout) for step in steps)
    each = [stage_seconds(shape, step, machine, layout) for step in steps]
    return sum(each[0][:-1]) + sum(max(times) for times in each[:-1]) + each[-1][-1]


def decode_seconds(
    shape: ModelShape, batch: int, context: int, machine: Machine, kv_dtype: str = "bfloat16", layout: Layout = ONE
) -> float:
    """Time of a step that gives each of `batch` sequences of `context` tokens one more."""
    step = Step(1, batch, context - 1, kv_dtype=kv_dtype)
    return step_seconds(shape, step, machine, layout)
