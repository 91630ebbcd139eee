"""Workloads: prompt and output lengths, arrival times, recorded traces, and their truncation."""

import csv
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import exp, log
from pathlib import Path

from headrace.data.progress import counted

# Range of token ids that every vocabulary has and that are no control tokens.
FIRST_ID, IDS = 1000, 8000
# Tokens per block hash of a Mooncake trace.
PREFIX_BLOCK = 512
WORDS = "the mill stands by a stream and water turns its wheel day after while grain becomes flour for bread".split()


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request: due time (seconds from the start), prompt and output length in tokens.

    `blocks`: the trace's hashes of the prompt's blocks. Equal hashes give equal tokens.
    """

    at: float
    prompt: int
    output: int
    seed: int = 0
    blocks: tuple[int, ...] = ()

    def ids(self, run: str = "") -> list[int]:
        """Token ids of the prompt. They differ between runs; requests with the same block hashes share prefixes in a run."""
        parts: list[int] = []
        for number, block in enumerate(self.blocks or (self.seed,)):
            rng = random.Random(f"{run}block {block}" if self.blocks else f"{run}prompt {self.seed}")
            size = min(PREFIX_BLOCK, self.prompt - number * PREFIX_BLOCK) if self.blocks else self.prompt
            parts += [FIRST_ID + rng.randrange(IDS) for _ in range(size)]
        rng = random.Random(f"{run}rest {self.seed}")
        return parts + [FIRST_ID + rng.randrange(IDS) for _ in range(self.prompt - len(parts))]

    def text(self, run: str = "") -> str:
        """A text of about as many tokens, for servers that accept no token ids."""
        rng = random.Random(f"{run}prompt {self.seed}")
        return " ".join(rng.choice(WORDS) for _ in range(self.prompt))


@dataclass(slots=True)
class Truncation:
    """Counts of what a workload lost: requests before and after, truncated prompts and outputs, and their lost tokens."""

    requests: int = 0
    kept: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    outputs: int = 0
    output_tokens: int = 0

    def summary(self) -> str:
        """The counts in one line."""
        first = f"the first {self.kept:,} of " if self.kept < self.requests else ""
        parts = [first + counted(self.requests, "requests")]
        if self.prompts:
            parts.append(f"{counted(self.prompts, 'prompts')} shortened by {counted(self.prompt_tokens, 'tokens')} in all")
        if self.outputs:
            parts.append(f"{counted(self.outputs, 'outputs')} shortened by {counted(self.output_tokens, 'tokens')} in all")
        return ", ".join(parts)


def describe_truncations(cuts: Mapping[str, Truncation]) -> str:
    """One line for several loads; loads with the same summary are grouped."""
    loads: dict[str, list[str]] = {}
    for name, cut in cuts.items():
        loads.setdefault(cut.summary(), []).append(name)
    return "; ".join(f"{', '.join(names)}: {line}" + (" each" if len(names) > 1 else "") for line, names in loads.items())


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths with these means. `tail`: standard deviation of the logarithm (0: all equal, 1: heavy-tailed)."""

    prompt: int = 128
    output: int = 64
    tail: float = 0.0

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self._length(self.prompt, rng), self._length(self.output, rng)

    def _length(self, mean: int, rng: random.Random) -> int:
        if not self.tail:
            return mean
        return max(1, round(exp(rng.gauss(log(mean) - self.tail**2 / 2, self.tail))))


def steady(count: int, lengths: Lengths, seed: int = 0) -> list[ScheduledRequest]:
    """Requests without arrival times, for a fixed number at once (closed loop)."""
    rng = random.Random(f"steady {seed}")
    return [ScheduledRequest(0.0, *lengths.draw(rng), seed=seed * 1_000_003 + number) for number in range(count)]


def poisson(count: int, rate: float, lengths: Lengths, seed: int = 0) -> list[ScheduledRequest]:
    """Requests with Poisson arrivals, `rate` per second on average."""
    rng = random.Random(f"poisson {seed}")
    at, requests = 0.0, []
    for request in steady(count, lengths, seed):
        requests.append(replace(request, at=at))
        at += rng.expovariate(rate)
    return requests


def read_trace(path: Path) -> list[ScheduledRequest]:
    """Requests of a trace: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSON lines.

    Raises ValueError.
    """
    try:
        with path.open(encoding="utf-8") as file:
            requests = list(_mooncake(file) if path.suffix == ".jsonl" else _azure(file))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a trace of a known format ({error!r}); give an Azure CSV or Mooncake .jsonl") from None
    if not requests:
        raise ValueError(f"{path} holds no requests")
    first = min(request.at for request in requests)
    return sorted((replace(request, at=request.at - first) for request in requests), key=lambda request: request.at)


def _azure(lines: Iterator[str]) -> Iterator[ScheduledRequest]:
    for number, row in enumerate(csv.DictReader(lines)):
        # Azure writes seven digits of a second; fromisoformat reads six.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield ScheduledRequest(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]), number)


def _mooncake(lines: Iterator[str]) -> Iterator[ScheduledRequest]:
    for number, line in enumerate(lines):
        row = json.loads(line)
        yield ScheduledRequest(
            row["timestamp"] / 1000, row["input_length"], row["output_length"], number, tuple(row.get("hash_ids", ()))
        )


@dataclass(frozen=True, slots=True)
class WorkloadLimits:
    """Truncation of a workload: `scale` multiplies arrival times, `prompt` and `output` cap lengths, `limit` cuts."""

    scale: float = 1.0
    prompt: int | None = None
    output: int | None = None
    limit: int | None = None
    cut: Truncation = field(default_factory=Truncation)

    def apply(self, requests: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        """The truncated requests; adds what was lost to `cut`."""
        kept = [self._truncate(request) for request in requests[: self.limit]]
        self.cut.requests += len(requests)
        self.cut.kept += len(kept)
        return kept

    def _truncate(self, request: ScheduledRequest) -> ScheduledRequest:
        prompt = min(request.prompt, self.prompt or request.prompt)
        output = max(1, min(request.output, self.output or request.output))
        self.cut.prompts += prompt < request.prompt
        self.cut.prompt_tokens += request.prompt - prompt
        self.cut.outputs += output < request.output
        self.cut.output_tokens += max(0, request.output - output)
        blocks = request.blocks[: -(-prompt // PREFIX_BLOCK)]
        return replace(request, at=request.at * self.scale, prompt=prompt, output=output, blocks=blocks)
