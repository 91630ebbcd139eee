"""Cells (named batch sizes and lengths), and the measurement of one cell in several engines in alternation."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from headrace.stats.paired_ratio import ratio


@dataclass(frozen=True, slots=True)
class Cell:
    """`batch` prompts of `prompt` random tokens.

    new_tokens: 0 measures prefill, until all sequences have their first token; otherwise decoding of `new_tokens` tokens per
    sequence after its first. fed: tokens of a sequence in a step; above 1 it measures verification: `new_tokens` steps of the
    last token and `fed` - 1 drafted tokens, all rejected.
    """

    name: str
    batch: int
    prompt: int
    new_tokens: int
    fed: int = 1

    @property
    def tokens(self) -> int:
        """Tokens in the KV cache at the end of a measurement."""
        return self.batch * (self.prompt + self.new_tokens + self.fed)

    def prompts(self, vocab_size: int, seed: object) -> list[list[int]]:
        """Prompts of one measurement: equal for equal seeds, so that all engines get the same ones, and new for each seed."""
        rng = random.Random(f"{self.name} {seed}")
        return [[rng.randrange(vocab_size) for _ in range(self.prompt)] for _ in range(self.batch)]


def _decode(batch: int) -> Cell:
    return Cell(f"b{batch}", batch, 128, 64 if batch <= 4 else 32)


CELLS = {
    cell.name: cell
    for cell in (
        Cell("pp512", 1, 512, 0),
        Cell("pp2048", 1, 2048, 0),
        *(_decode(batch) for batch in (1, 2, 4, 8, 16, 32)),
        Cell("b1_4k", 1, 4000, 64),
    )
}


def pick(names: str) -> list[Cell]:
    """Cells of a comma-separated list of names, all if it is empty. Raises ValueError for an unknown name."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(CELLS)
    if unknown := [name for name in wanted if name not in CELLS]:
        raise ValueError(f"there is no cell {unknown[0]!r}; choose from {', '.join(CELLS)}")
    return [CELLS[name] for name in dict.fromkeys(wanted)]


class Engine(Protocol):
    """A loaded engine that answers one measurement with a dictionary (`worker.Worker`)."""

    def ask(self, **question: Any) -> dict[str, Any]: ...


@dataclass(slots=True)
class Variant:
    """One engine with one setting. Measurements by cell: tokens/s of each round, and the first token of each prompt."""

    engine: str
    setting: str
    worker: Engine
    samples: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, list[int]] = field(default_factory=dict)
    peak_rss_mb: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.engine} ({self.setting})" if self.setting else self.engine

    def speed(self, cell: Cell) -> float:
        """Median tokens/s."""
        return median(self.samples[cell.name])


@dataclass(slots=True)
class MachineState:
    """Memory bandwidth (GB/s) between the rounds, and the share of the cores that other processes used during them."""

    bandwidth: list[float] = field(default_factory=list)
    others_cpu: list[float] = field(default_factory=list)


def measure(
    variants: Sequence[Variant], cell: Cell, rounds: int, vocab_size: int, bandwidth: Callable[[], float]
) -> MachineState:
    """Run one warm-up round and `rounds` measured ones. In a round every variant runs the same prompts, one after the other.

    Every second round runs in reverse order, so that a slow drift of the machine favours no variant.
    """
    state = MachineState()
    for number in range(-1, rounds):
        prompts = cell.prompts(vocab_size, number)
        if number >= 0:
            state.bandwidth.append(bandwidth())
        for variant in variants if number % 2 == 0 else list(reversed(variants)):
            fed = {"fed": cell.fed} if cell.fed > 1 else {}
            answer = variant.worker.ask(cell=cell.name, prompts=prompts, new_tokens=cell.new_tokens, **fed)
            variant.peak_rss_mb = answer.get("peak_rss_mb", 0.0)
            if number >= 0:
                variant.samples.setdefault(cell.name, []).append(answer["tokens_per_s"])
                variant.first.setdefault(cell.name, []).extend(answer["first"])
                state.others_cpu.append(answer["others_cpu"])
    state.bandwidth.append(bandwidth())
    return state


def judge(ours: Variant, others: Sequence[Variant], cell: Cell, state: MachineState) -> dict[str, Any]:
    """Figures of one cell for the JSON file: our speed, each engine's best setting, and the ratio to the fastest engine."""
    best: dict[str, Variant] = {}
    for variant in sorted(others, key=lambda variant: variant.speed(cell)):
        best[variant.engine] = variant
    peers = {engine: _against(ours, variant, others, cell) for engine, variant in best.items()}
    figures = {
        "tokens_per_s": ours.speed(cell),
        "samples": ours.samples[cell.name],
        "bandwidth_gb_s": median(state.bandwidth),
        "others_cpu": median(state.others_cpu),
        "peers": peers,
    }
    if peers:
        winner = max(peers, key=lambda engine: peers[engine]["tokens_per_s"])
        figures |= {"best_peer": winner, **{key: peers[winner][key] for key in ("ratio", "interval", "confidence")}}
    return figures


def _against(ours: Variant, best: Variant, others: Sequence[Variant], cell: Cell) -> dict[str, Any]:
    """Figures of the best variant of one engine. `same_first_token` checks that both compute the same model; it is None for an
    engine that chooses its own prompts."""
    pairs = ratio(ours.samples[cell.name], best.samples[cell.name])
    firsts = best.first[cell.name]
    same = [mine == theirs for mine, theirs in zip(ours.first[cell.name], firsts, strict=True)] if firsts else []
    return {
        "tokens_per_s": best.speed(cell),
        "setting": best.setting,
        "samples": best.samples[cell.name],
        "settings": {variant.setting: variant.speed(cell) for variant in others if variant.engine == best.engine},
        "ratio": pairs.median,
        "interval": [pairs.low, pairs.high],
        "confidence": pairs.confidence,
        "same_first_token": sum(same) / len(same) if same else None,
    }
