"""Never slower: speculation left to the controller beside plain decoding, by batch, kind of text and drafter."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from random import Random
from statistics import median
from typing import Any

from headrace.bench.machine import commit, machine, others_share
from headrace.bench.pairs import ratio
from headrace.bench.speculation import Timed, timed
from headrace.data.params import SamplingParams
from headrace.drafting.base import ModelDrafter
from headrace.drafting.speculation import Speculation
from headrace.host import busy_seconds
from headrace.llm import LLM

LIMIT = 0.97  # of plain decoding's speed: no cell may be slower
NEAR = 0.05  # a cell this close to the limit needs MANY pairs
FEW, MANY = 5, 15
BATCHES = (1, 4, 8, 16, 32)
RANDOM = "random"  # the text that nobody can guess
LEAST_TOKENS, MOST_TOKENS = 8, 96


@dataclass(frozen=True, slots=True)
class GridCell:
    """A batch of one kind of text. `draft`: the drafter that runs a model (a draft model, heads, blocks) is asked too."""

    batch: int
    task: str
    draft: bool

    @property
    def name(self) -> str:
        return f"b{self.batch}-{self.task}-{'draft' if self.draft else 'none'}"


@dataclass(slots=True)
class Texts:
    """Prompts of one kind, and how their answers are drawn. `endless`: they go on where the model would end."""

    prompts: list[list[int]]
    temperature: float = 0.0
    endless: bool = False

    def batch(self, size: int, number: int) -> list[list[int]]:
        """The `number`-th batch: the prompts in turns, from the beginning again after the last."""
        return [self.prompts[(number * size + at) % len(self.prompts)] for at in range(size)]

    def params(self, size: int, tokens: int) -> list[SamplingParams]:
        params = SamplingParams(temperature=self.temperature, max_tokens=tokens, ignore_eos=self.endless)
        return [params.replace(seed=at) for at in range(size)]


@dataclass(slots=True)
class Pairs:
    """A cell as far as it was measured: tokens/s of plain and of speculative runs, pair by pair."""

    plain: list[float] = field(default_factory=list)
    auto: list[float] = field(default_factory=list)
    others_cpu: list[float] = field(default_factory=list)
    steps: int = 0  # of the speculative runs
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0  # a run decodes at most, of each sequence

    def enough(self, few: int, many: int) -> bool:
        """`few` pairs do where their median is far from the limit, `many` everywhere."""
        done = len(self.auto)
        return done >= many or (done >= few and abs(ratio(self.auto, self.plain).median / LIMIT - 1) > NEAR)

    def figures(self) -> dict[str, Any]:
        """The cell as it stands in the JSON."""
        found = ratio(self.auto, self.plain)
        return {
            "ratio": found.median,
            "interval": [found.low, found.high],
            "confidence": found.confidence,
            "reached": found.median >= LIMIT,
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
    """The grid, or those of its cells that match one of the comma-separated patterns (b1-*, *-chat-none).

    Raises ValueError for a pattern that names no cell.
    """
    drafts = (False, True) if draft else (False,)
    every = [GridCell(batch, task, drafted) for drafted in drafts for task in tasks for batch in batches]
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()] or ["*"]
    for pattern in wanted:
        if not any(fnmatchcase(cell.name, pattern) for cell in every):
            raise ValueError(f"no cell is called {pattern!r}; the first is {every[0].name}, the last {every[-1].name}")
    return [cell for cell in every if any(fnmatchcase(cell.name, pattern) for pattern in wanted)]


def random_texts(vocab_size: int, count: int = 32, length: int = 64) -> Texts:
    """Random tokens, answered at temperature 1: little in them comes twice."""
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
    """Every cell in turn, plain and speculative runs of about `seconds` in pairs; `done` gets the JSON after each.

    Ends with the engine as it was. Raises ValueError where the LLM speculates in no way, RuntimeError should an output change.
    """
    ours = llm.engine.speculation
    if ours is None:
        raise ValueError("this model does not speculate here, so there is nothing to compare")
    result: dict[str, Any] = {"machine": machine(), "commit": commit(), "limit": LIMIT, "cells": {}}
    for cell in wanted:
        drafters = [one for one in ours.drafters if cell.draft or not isinstance(one, ModelDrafter)]
        speculation = Speculation(drafters, llm.memory_plan.max_model_len)
        pairs = measure_cell(llm, cell, texts[cell.task], speculation, few, many, seconds)
        result["cells"][cell.name] = figures = pairs.figures()
        say(f"{cell.name}: {figures['ratio']:.3f} ({figures['pairs']} pairs)")
        done(result)
    return result


def measure_cell(
    llm: LLM, cell: GridCell, texts: Texts, speculation: Speculation, few: int, many: int, seconds: float
) -> Pairs:
    """Pairs of one cell, after a run of each kind to warm up. Every second pair goes the other way round. What the controller
    has learnt of the machine it keeps from run to run, as in a server."""
    warm = timed(llm, texts.batch(cell.batch, 0), texts.params(cell.batch, LEAST_TOKENS), None)[0]
    a_token = cell.batch / warm.speed
    pairs = Pairs(tokens=min(max(int(seconds / a_token), LEAST_TOKENS), MOST_TOKENS))
    params = texts.params(cell.batch, pairs.tokens)
    for prompts in _all_batches(texts, cell.batch, many):
        timed(llm, prompts, texts.params(cell.batch, 2), None)  # into the prefix cache
    timed(llm, texts.batch(cell.batch, 0), params, speculation)
    while not pairs.enough(few, many):
        _pair(llm, cell, texts, params, speculation, pairs)
    return pairs


def _all_batches(texts: Texts, size: int, many: int) -> list[list[list[int]]]:
    """The batches that hold every prompt that `many` pairs use."""
    return [texts.batch(size, number) for number in range(min(many, -(-len(texts.prompts) // size)))]


def _pair(llm: LLM, cell: GridCell, texts: Texts, params: list[SamplingParams], speculation: Speculation, pairs: Pairs) -> None:
    number = len(pairs.auto)
    prompts = texts.batch(cell.batch, number)
    found: dict[bool, tuple[Timed, list[list[int]]]] = {}
    busy, mine, began = busy_seconds(), time.process_time(), time.perf_counter()
    for speculative in (False, True) if number % 2 == 0 else (True, False):
        found[speculative] = timed(llm, prompts, params, speculation if speculative else None)
    others = (busy_seconds() - busy) - (time.process_time() - mine)
    pairs.others_cpu.append(others_share(others, time.perf_counter() - began))
    (plain, expected), (auto, got) = found[False], found[True]
    if got != expected:
        raise RuntimeError(f"{cell.name}: speculation changed an output; please report this")
    pairs.plain.append(plain.speed)
    pairs.auto.append(auto.speed)
    pairs.steps += auto.steps
    pairs.drafted += auto.drafted
    pairs.accepted += auto.accepted
