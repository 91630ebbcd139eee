"""Measure one cell in several engines in alternation, and compare their speeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from headrace.bench.cells import Cell
from headrace.stats.paired_ratio import ratio


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
