"""What is asked for, and when: lengths, arrivals, traces; and what a trace loses when it is cut."""

import csv
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import exp, log
from pathlib import Path

from headrace.data.progress import counted

FIRST_ID, IDS = 1000, 8000  # token ids that every vocabulary has and that mean nothing special in any
PREFIX_BLOCK = 512  # tokens that one hash of a Mooncake trace stands for
WORDS = "the mill stands by a stream and water turns its wheel day after while grain becomes flour for bread".split()


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it is due (seconds from the start), prompt and output length in tokens.

    `blocks` are the trace's hashes of the prompt's blocks: equal hashes are equal tokens.
    """

    at: float
    prompt: int
    output: int
    seed: int = 0
    blocks: tuple[int, ...] = ()

    def ids(self, run: str = "") -> list[int]:
        """The prompt as token ids. Another `run` has other prompts; prefixes that its jobs share stay shared."""
        parts: list[int] = []
        for number, block in enumerate(self.blocks or (self.seed,)):
            rng = random.Random(f"{run}block {block}" if self.blocks else f"{run}prompt {self.seed}")
            size = min(PREFIX_BLOCK, self.prompt - number * PREFIX_BLOCK) if self.blocks else self.prompt
            parts += [FIRST_ID + rng.randrange(IDS) for _ in range(size)]
        rng = random.Random(f"{run}rest {self.seed}")
        return parts + [FIRST_ID + rng.randrange(IDS) for _ in range(self.prompt - len(parts))]

    def text(self, run: str = "") -> str:
        """A prompt of about as many tokens, for servers that take no ids."""
        rng = random.Random(f"{run}prompt {self.seed}")
        return " ".join(rng.choice(WORDS) for _ in range(self.prompt))


@dataclass(slots=True)
class Cut:
    """What of a load was left out."""

    requests: int = 0  # before it was cut
    kept: int = 0
    prompts: int = 0  # that were shortened
    prompt_tokens: int = 0  # that were cut off
    outputs: int = 0
    output_tokens: int = 0

    def summary(self) -> str:
        """One line."""
        first = f"the first {self.kept:,} of " if self.kept < self.requests else ""
        parts = [first + counted(self.requests, "requests")]
        if self.prompts:
            parts.append(f"{counted(self.prompts, 'prompts')} shortened by {counted(self.prompt_tokens, 'tokens')} in all")
        if self.outputs:
            parts.append(f"{counted(self.outputs, 'outputs')} shortened by {counted(self.output_tokens, 'tokens')} in all")
        return ", ".join(parts)


def described(cuts: Mapping[str, Cut]) -> str:
    """One line of several loads, by their names: those of which the same is to be said come together."""
    loads: dict[str, list[str]] = {}
    for name, cut in cuts.items():
        loads.setdefault(cut.summary(), []).append(name)
    return "; ".join(f"{', '.join(names)}: {line}" + (" each" if len(names) > 1 else "") for line, names in loads.items())


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths with these means; `tail` is the spread of the logarithm (0: all equal, 1: heavy-tailed)."""

    prompt: int = 128
    output: int = 64
    tail: float = 0.0

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self._one(self.prompt, rng), self._one(self.output, rng)

    def _one(self, mean: int, rng: random.Random) -> int:
        if not self.tail:
            return mean
        return max(1, round(exp(rng.gauss(log(mean) - self.tail**2 / 2, self.tail))))


def steady(count: int, lengths: Lengths, seed: int = 0) -> list[Job]:
    """Requests without times, for a fixed number at once."""
    rng = random.Random(f"steady {seed}")
    return [Job(0.0, *lengths.draw(rng), seed=seed * 1_000_003 + number) for number in range(count)]


def poisson(count: int, rate: float, lengths: Lengths, seed: int = 0) -> list[Job]:
    """Independent arrivals, `rate` a second on average."""
    rng = random.Random(f"poisson {seed}")
    at, jobs = 0.0, []
    for job in steady(count, lengths, seed):
        jobs.append(replace(job, at=at))
        at += rng.expovariate(rate)
    return jobs


def read_trace(path: Path) -> list[Job]:
    """A trace: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON lines. Raises ValueError."""
    try:
        with path.open(encoding="utf-8") as file:
            jobs = list(_mooncake(file) if path.suffix == ".jsonl" else _azure(file))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no trace this command knows ({error!r}); give an Azure CSV or Mooncake .jsonl") from None
    if not jobs:
        raise ValueError(f"{path} holds no requests")
    first = min(job.at for job in jobs)
    return sorted((replace(job, at=job.at - first) for job in jobs), key=lambda job: job.at)


def _azure(lines: Iterator[str]) -> Iterator[Job]:
    for number, row in enumerate(csv.DictReader(lines)):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()  # Azure writes seven digits of a second
        yield Job(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]), number)


def _mooncake(lines: Iterator[str]) -> Iterator[Job]:
    for number, line in enumerate(lines):
        row = json.loads(line)
        yield Job(row["timestamp"] / 1000, row["input_length"], row["output_length"], number, tuple(row.get("hash_ids", ())))


@dataclass(frozen=True, slots=True)
class Bounds:
    """How a workload is made to fit: `scale` times the times between arrivals, caps shorten, `limit` takes the first."""

    scale: float = 1.0
    prompt: int | None = None
    output: int | None = None
    limit: int | None = None
    cut: Cut = field(default_factory=Cut)

    def apply(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs that are left; `cut` is told what was lost."""
        kept = [self._one(job) for job in jobs[: self.limit]]
        self.cut.requests += len(jobs)
        self.cut.kept += len(kept)
        return kept

    def _one(self, job: Job) -> Job:
        prompt = min(job.prompt, self.prompt or job.prompt)
        output = max(1, min(job.output, self.output or job.output))
        self.cut.prompts += prompt < job.prompt
        self.cut.prompt_tokens += job.prompt - prompt
        self.cut.outputs += output < job.output
        self.cut.output_tokens += max(0, job.output - output)
        blocks = job.blocks[: -(-prompt // PREFIX_BLOCK)]
        return replace(job, at=job.at * self.scale, prompt=prompt, output=output, blocks=blocks)
