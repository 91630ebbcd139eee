"""Answers of the planner: what fits, how long it takes, and which layouts are worth having."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.startup.fit.costs import Step, decode_seconds, prefill_seconds, stage_seconds
from headrace.startup.fit.machine import Machine
from headrace.startup.fit.shapes import ModelShape
from headrace.startup.fit.sizes import BLOCK, ONE, TP, Layout, Load, check_layout, heads_of, largest_rank

# Most sequences that the solvers look at.
MOST = 1 << 16
# Contexts of the table.
CONTEXTS = (2048, 8192, 32768, 131072)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits, 0 if 1 does not. Larger numbers must not fit where smaller ones do not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def fits(shape: ModelShape, load: Load, memory: int, layout: Layout = ONE) -> bool:
    """Whether every rank of a layout fits in `memory` bytes."""
    return largest_rank(shape, load, layout).total <= memory


def largest_batch(shape: ModelShape, load: Load, memory: int, layout: Layout = ONE) -> int:
    """Most sequences of `load.context` tokens in `memory` bytes a rank."""
    return largest(lambda batch: fits(shape, replace(load, batch=batch), memory, layout), MOST)


def longest_context(shape: ModelShape, load: Load, memory: int, layout: Layout = ONE) -> int:
    """Longest context of `load.batch` sequences: whole blocks, at most the model's own."""
    blocks = largest(
        lambda count: fits(shape, replace(load, context=min(count * BLOCK, shape.max_position)), memory, layout),
        -(-shape.max_position // BLOCK),
    )
    return min(blocks * BLOCK, shape.max_position)


def batch_under(shape: ModelShape, load: Load, machine: Machine, tpot: float, memory: int, layout: Layout = ONE) -> int:
    """Most sequences that fit and whose decoding step takes at most `tpot` seconds."""

    def in_time(batch: int) -> bool:
        return decode_seconds(shape, batch, load.context, machine, load.kv_dtype, layout) <= tpot

    return largest(in_time, largest_batch(shape, load, memory, layout))


def chunk_under(shape: ModelShape, load: Load, machine: Machine, ttft: float, layout: Layout = ONE) -> tuple[int, float]:
    """Smallest chunk, a power of two, with which a prompt of `load.context` tokens has its first token within `ttft` seconds,
    and that time; (0, the shortest time) if none has. Small chunks keep the pauses of other requests short."""
    times = {}
    for power in range(4, max(5, (load.context - 1).bit_length() + 1)):
        chunk = 1 << power
        times[chunk] = prefill_seconds(shape, load.context, machine, chunk, load.kv_dtype, layout)
        if times[chunk] <= ttft:
            return chunk, times[chunk]
    return 0, min(times.values())


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout with its memory and speed. binding: what limits it, for people. total: bytes of its largest rank.

    batch: sequences of the load's context that fit, all replicas together. tpot: seconds of a decoding step at `load.batch`
    sequences. tokens_per_s: of all replicas at the batch that fits. ttft: seconds of a prompt of the context.
    """

    layout: Layout
    total: int
    batch: int
    tpot: float
    ttft: float
    tokens_per_s: float
    binding: str

    def dominates(self, other: "Choice") -> bool:
        """Whether it is at least as good in every respect, with at most as many processes, and better in one."""
        mine, its = self.goodness, other.goodness
        return mine != its and all(a >= b for a, b in zip(mine, its, strict=True))

    @property
    def goodness(self) -> tuple[float, ...]:
        return (self.batch, -self.tpot, -self.ttft, self.tokens_per_s, -self.layout.ranks)


def layouts(shape: ModelShape, devices: int) -> list[Layout]:
    """Every layout of at most `devices` ranks that the model can have."""
    made = []
    for tp in TP:
        for pp in range(1, devices // tp + 1):
            for replicas in range(1, devices // (tp * pp) + 1):
                layout = Layout(tp, pp, replicas)
                try:
                    check_layout(shape, layout)
                    largest_rank(shape, Load(BLOCK), layout)
                except ValueError:
                    continue
                made.append(layout)
    return made


def choose(shape: ModelShape, load: Load, machine: Machine, memory: int, layout: Layout) -> Choice:
    """Memory and speed of a layout whose ranks have `memory` bytes each."""
    alone = replace(layout, replicas=1)
    total = largest_rank(shape, load, alone).total
    batch = largest_batch(shape, load, memory, alone)
    tpot = decode_seconds(shape, load.batch, load.context, machine, load.kv_dtype, alone)
    used = min(batch, 512)
    rate = _rate(shape, used, load, machine, alone) if used else 0.0
    ttft = prefill_seconds(shape, load.context, machine, load.chunk, load.kv_dtype, alone)
    return Choice(
        layout, total, batch * layout.replicas, tpot, ttft, rate * layout.replicas, _binding(shape, load, memory, alone, total)
    )


def _rate(shape: ModelShape, batch: int, load: Load, machine: Machine, layout: Layout) -> float:
    """Tokens/s of `batch` sequences. Stages work on groups of sequences at the same time."""
    groups = min(layout.pp, batch)
    part = -(-batch // groups)
    times = stage_seconds(shape, Step(1, part, load.context - 1, kv_dtype=load.kv_dtype), machine, layout)
    return batch / max(sum(times), groups * max(times))


def _binding(shape: ModelShape, load: Load, memory: int, layout: Layout, total: int) -> str:
    """What limits a layout: weights that do not fit, K/V, or heads that ranks cannot share evenly."""
    bytes_ = largest_rank(shape, load, layout)
    if bytes_.weights + bytes_.buffers + bytes_.process > memory:
        return "the weights do not fit"
    if total > memory:
        return "K/V do not fit"
    layer = next((layer for layer in shape.layers if layer.heads), None)
    if layer is not None and layout.tp > 1:
        if layer.latent:
            return f"the latent K/V are held by each of {layout.tp} ranks"
        held = sum(len(heads_of(layer, layout.tp, rank)[1]) for rank in range(layout.tp))
        if held > layer.kv_heads:
            return f"{layer.heads} query heads on {layer.kv_heads} KV heads: tp {layout.tp} keeps {held}"
    return "K/V" if bytes_.kv >= bytes_.weights else "weights"


def best(shape: ModelShape, load: Load, machine: Machine, memory: int, devices: int) -> list[Choice]:
    """Layouts that fit and that no other dominates, the fewest ranks first; all that do not fit if none does."""
    every = [choose(shape, load, machine, memory, layout) for layout in layouts(shape, devices)]
    fitting = [choice for choice in every if choice.batch >= load.batch] or every
    kept = [choice for choice in fitting if not any(other.dominates(choice) for other in fitting)]
    return sorted(kept, key=lambda choice: (choice.layout.ranks, choice.layout.tp, choice.layout.pp))


def advice(shape: ModelShape, load: Load, memory: int, devices: int, choices: Sequence[Choice]) -> list[str]:
    """Sentences about one process, two sockets and several hosts."""
    alone = next((choice for choice in choices if choice.layout.ranks == 1), None)
    fit_choices = [choice for choice in choices if choice.batch >= load.batch]
    if not fit_choices:
        return [f"nothing fits on {devices}: take fewer bits, a shorter context, fewer sequences, or more machines"]
    if alone is None or alone.batch < load.batch:
        first = fit_choices[0]
        return [f"one is too small ({first.binding} limits): {first.layout} is the smallest layout that fits"]
    said = ["two sockets: nothing to do, one process uses both"] if devices == 1 else []
    copies = min(devices, 3) if devices > 1 else 3
    said.append(f"{'three' if copies == 3 else 'two'} hosts: replicas, {copies} times the sequences")
    faster = min(choices, key=lambda choice: choice.tpot)
    if faster.layout.tp > 1 and faster.tpot < 0.9 * alone.tpot:
        said.append(f"one sequence is fastest with {faster.layout}: {alone.tpot / faster.tpot:.1f} × (predicted)")
    return said
