"""One cell measured by several engines in turns, and what its figures say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from headrace.bench.cells import Cell
from headrace.bench.pairs import ratio


class Asked(Protocol):
    """What answers a question: worker.Worker."""

    def ask(self, **question: Any) -> dict[str, Any]: ...


@dataclass(slots=True)
class Party:
    """One engine with one setting. Of every cell: tokens/s of each round, and the first token of each prompt."""

    engine: str
    setting: str
    worker: Asked
    samples: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, list[int]] = field(default_factory=dict)
    peak_rss_mb: float = 0.0  # of its process so far

    @property
    def name(self) -> str:
        return f"{self.engine} ({self.setting})" if self.setting else self.engine

    def speed(self, cell: Cell) -> float:
        """Median tokens/s."""
        return median(self.samples[cell.name])


@dataclass(slots=True)
class Around:
    """What the machine was like around the rounds: GB/s, and the share of its cores that other processes used."""

    bandwidth: list[float] = field(default_factory=list)
    others_cpu: list[float] = field(default_factory=list)


def measure(parties: Sequence[Party], cell: Cell, rounds: int, vocab_size: int, bandwidth: Callable[[], float]) -> Around:
    """A round to warm up, then `rounds` in which every party measures the same prompts, one after the other.

    Every second round goes the other way, so that a slow drift of the machine favours nobody.
    """
    around = Around()
    for number in range(-1, rounds):
        prompts = cell.prompts(vocab_size, number)
        if number >= 0:
            around.bandwidth.append(bandwidth())
        for party in parties if number % 2 == 0 else list(reversed(parties)):
            fed = {"fed": cell.fed} if cell.fed > 1 else {}
            answer = party.worker.ask(cell=cell.name, prompts=prompts, new_tokens=cell.new_tokens, **fed)
            party.peak_rss_mb = answer.get("peak_rss_mb", 0.0)
            if number >= 0:
                party.samples.setdefault(cell.name, []).append(answer["tokens_per_s"])
                party.first.setdefault(cell.name, []).extend(answer["first"])
                around.others_cpu.append(answer["others_cpu"])
    around.bandwidth.append(bandwidth())
    return around


def judge(ours: Party, others: Sequence[Party], cell: Cell, around: Around) -> dict[str, Any]:
    """The cell's figures, as in the JSON: our speed, every engine by its best setting, the ratio to the best engine."""
    best: dict[str, Party] = {}
    for party in sorted(others, key=lambda party: party.speed(cell)):
        best[party.engine] = party
    peers = {engine: _against(ours, party, others, cell) for engine, party in best.items()}
    figures = {
        "tokens_per_s": ours.speed(cell),
        "samples": ours.samples[cell.name],
        "bandwidth_gb_s": median(around.bandwidth),
        "others_cpu": median(around.others_cpu),
        "peers": peers,
    }
    if peers:
        winner = max(peers, key=lambda engine: peers[engine]["tokens_per_s"])
        figures |= {"best_peer": winner, **{key: peers[winner][key] for key in ("ratio", "interval", "confidence")}}
    return figures


def _against(ours: Party, best: Party, others: Sequence[Party], cell: Cell) -> dict[str, Any]:
    """One engine in one cell, by its best setting there. `same_first_token`: do both compute the same model? None where it
    chooses its own prompts."""
    pairs = ratio(ours.samples[cell.name], best.samples[cell.name])
    firsts = best.first[cell.name]
    same = [mine == theirs for mine, theirs in zip(ours.first[cell.name], firsts, strict=True)] if firsts else []
    return {
        "tokens_per_s": best.speed(cell),
        "setting": best.setting,
        "samples": best.samples[cell.name],
        "settings": {party.setting: party.speed(cell) for party in others if party.engine == best.engine},
        "ratio": pairs.median,
        "interval": [pairs.low, pairs.high],
        "confidence": pairs.confidence,
        "same_first_token": sum(same) / len(same) if same else None,
    }
