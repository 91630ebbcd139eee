"""Check that speculation is never slower than plain decoding, by batch size, kind of text and drafter."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from random import Random
from statistics import median
from typing import Any

from headrace.bench.figures import Column
from headrace.bench.machine import commit, machine, others_share
from headrace.bench.speculation import TimedRun, timed
from headrace.data.params import SamplingParams
from headrace.drafting.base import ModelDrafter
from headrace.drafting.speculation import Speculation
from headrace.host import busy_seconds
from headrace.llm import LLM
from headrace.stats.paired_ratio import ratio

# Least ratio of speculative to plain speed that does not count as slower.
LIMIT = 0.97
# Cells whose ratio is this close to the limit need MANY pairs.
NEAR = 0.05
FEW, MANY = 5, 15  # pairs
BATCHES = (1, 4, 8, 16, 32)
RANDOM = "random"
LEAST_TOKENS, MOST_TOKENS = 8, 96  # of each sequence in a run
COLUMNS = (
    Column("cell", "{cell}"),
    Column("plain tokens/s", "{plain_tokens_per_s:.1f}"),
    Column("auto tokens/s", "{auto_tokens_per_s:.1f}"),
    Column("ratio", lambda row: f"{row['ratio']:.3f}" + ("" if row["reached"] else " (slower)")),
    Column("interval", "{interval[0]:.3f} to {interval[1]:.3f}"),
    Column("pairs", "{pairs}"),
    Column("accepted", "{accepted}"),
    Column("of drafted", "{drafted}"),
    Column("other load", "{others_cpu:.0%}"),
)


@dataclass(frozen=True, slots=True)
class GridCell:
    """A batch of one kind of text. `draft`: drafters that run a model (a draft model, heads, blocks) take part."""

    batch: int
    task: str
    draft: bool

    @property
    def name(self) -> str:
        return f"b{self.batch}-{self.task}-{'draft' if self.draft else 'none'}"


@dataclass(slots=True)
class Texts:
    """Prompts of one kind, and how their answers are sampled. `endless`: the end-of-text token is ignored."""

    prompts: list[list[int]]
    temperature: float = 0.0
    endless: bool = False

    def batch(self, size: int, number: int) -> list[list[int]]:
        """The batch with this number: consecutive prompts, starting again after the last one."""
        return [self.prompts[(number * size + at) % len(self.prompts)] for at in range(size)]

    def params(self, size: int, tokens: int) -> list[SamplingParams]:
        params = SamplingParams(temperature=self.temperature, max_tokens=tokens, ignore_eos=self.endless)
        return [params.replace(seed=at) for at in range(size)]


@dataclass(slots=True)
class Pairs:
    """Measurements of one cell so far: tokens/s of plain and speculative runs, pair by pair.

    `steps`, `drafted`, `accepted`: sums over the speculative runs. `tokens`: limit of each sequence in a run.
    """

    plain: list[float] = field(default_factory=list)
    auto: list[float] = field(default_factory=list)
    others_cpu: list[float] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0

    def enough(self, few: int, many: int) -> bool:
        """Whether to stop: after `few` pairs if their median is far from the limit, otherwise after `many`."""
        done = len(self.auto)
        return done >= many or (done >= few and abs(ratio(self.auto, self.plain).median / LIMIT - 1) > NEAR)

    def figures(self) -> dict[str, Any]:
        """Figures of the cell for the JSON file."""
        pair = ratio(self.auto, self.plain)
        return {
            "ratio": pair.median,
            "interval": [pair.low, pair.high],
            "confidence": pair.confidence,
            "reached": pair.median >= LIMIT,
            "pairs": len(self.auto),
            "plain_tokens_per_s": median(self.plain),
            "auto_tokens_per_s": median(self.auto),
            "ratios": [mine / other for mine, other in zip(self.auto, self.plain, strict=True)],
            "tokens": self.tokens,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "others_cpu": median(self.others_cpu),
        }


def cells(tasks: Sequence[str], draft: bool, patterns: str = "", batches: Sequence[int] = BATCHES) -> list[GridCell]:
    """Cells of the grid that match one of the comma-separated patterns (b1-*, *-chat-none); all without patterns.

    Raises ValueError for a pattern that matches no cell.
    """
    drafts = (False, True) if draft else (False,)
    every = [GridCell(batch, task, drafted) for drafted in drafts for task in tasks for batch in batches]
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()] or ["*"]
    for pattern in wanted:
        if not any(fnmatchcase(cell.name, pattern) for cell in every):
            raise ValueError(f"no cell is called {pattern!r}; the first is {every[0].name}, the last {every[-1].name}")
    return [cell for cell in every if any(fnmatchcase(cell.name, pattern) for pattern in wanted)]


def random_texts(vocab_size: int, count: int = 32, length: int = 64) -> Texts:
    """Prompts of random tokens, answered at temperature 1: n-grams rarely repeat, so drafts are rarely accepted."""
    rng = Random("random text")
    return Texts([[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)], 1.0, endless=True)


def measure(
    llm: LLM,
    texts: dict[str, Texts],
    wanted: Sequence[GridCell],
    *,
    few: int = FEW,
    many: int = MANY,
    seconds: float = 1.0,
    say: Callable[[str], None] = lambda line: None,
    done: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure each cell by `few` to `many` pairs of a plain and a speculative run of about `seconds` each.

    say: receives a line for each cell. done: called with the result so far after each cell. The engine's speculation is
    restored at the end. Raises ValueError if the LLM has no drafter, and RuntimeError if speculation changes an output.
    """
    ours = llm.engine.speculation
    if ours is None:
        raise ValueError("this model does not speculate here, so there is nothing to compare")
    result: dict[str, Any] = {"machine": machine(), "commit": commit(), "limit": LIMIT, "cells": {}}
    for cell in wanted:
        drafters = [drafter for drafter in ours.drafters if cell.draft or not isinstance(drafter, ModelDrafter)]
        speculation = Speculation(drafters, llm.memory_plan.max_model_len)
        pairs = measure_cell(llm, cell, texts[cell.task], speculation, few, many, seconds)
        result["cells"][cell.name] = figures = pairs.figures()
        say(f"{cell.name}: {figures['ratio']:.3f} ({figures['pairs']} pairs)")
        done(result)
    return result


def measure_cell(
    llm: LLM, cell: GridCell, texts: Texts, speculation: Speculation, few: int, many: int, seconds: float
) -> Pairs:
    """Pairs of one cell, after a warm-up run of each kind. Every second pair runs in reverse order.

    The controller keeps its measured costs from run to run, as in a server.
    """
    warm = timed(llm, texts.batch(cell.batch, 0), texts.params(cell.batch, LEAST_TOKENS), None)[0]
    a_token = cell.batch / warm.speed
    pairs = Pairs(tokens=min(max(int(seconds / a_token), LEAST_TOKENS), MOST_TOKENS))
    params = texts.params(cell.batch, pairs.tokens)
    # Fills the prefix cache with every prompt that `many` pairs use.
    for number in range(min(many, -(-len(texts.prompts) // cell.batch))):
        timed(llm, texts.batch(cell.batch, number), texts.params(cell.batch, 2), None)
    timed(llm, texts.batch(cell.batch, 0), params, speculation)
    while not pairs.enough(few, many):
        _pair(llm, cell, texts, params, speculation, pairs)
    return pairs


def _pair(llm: LLM, cell: GridCell, texts: Texts, params: list[SamplingParams], speculation: Speculation, pairs: Pairs) -> None:
    number = len(pairs.auto)
    prompts = texts.batch(cell.batch, number)
    runs: dict[bool, tuple[TimedRun, list[list[int]]]] = {}
    busy, mine, began = busy_seconds(), time.process_time(), time.perf_counter()
    for speculative in (False, True) if number % 2 == 0 else (True, False):
        runs[speculative] = timed(llm, prompts, params, speculation if speculative else None)
    others = (busy_seconds() - busy) - (time.process_time() - mine)
    pairs.others_cpu.append(others_share(others, time.perf_counter() - began))
    (plain, expected), (auto, got) = runs[False], runs[True]
    if got != expected:
        raise RuntimeError(f"{cell.name}: speculation changed an output; please report this")
    pairs.plain.append(plain.speed)
    pairs.auto.append(auto.speed)
    pairs.steps += auto.steps
    pairs.drafted += auto.drafted
    pairs.accepted += auto.accepted
