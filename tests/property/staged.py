"""Fake models of which a part writes first: an exit, or the smaller model of a cascade. Each has pools of tokens of its own, so
that whatever is not there, or is another sequence's, changes what is said.

The runner and what decides who writes are the real ones.
"""

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.fake_model import EOS, VOCAB, Deferred, FakeRunner, draw
from headrace.backends.eager.live import EagerLive
from headrace.backends.native.program import NativeStoredRows
from headrace.data.config import EngineConfig
from headrace.data.plan import CASCADE, HIDDEN, TARGET, UPPER, Answers, Feed, KVGroup, NewSlot, Ranked, StepPlan
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.runner.early_exit import Exit
from headrace.runner.runner import Runner
from headrace.runner.span import Span
from tests.property.test_engine import Job

AFTER, LAYERS = 1, 2
FIRST = VOCAB  # behind a context: what is asked first says something else than the whole model


def confidence(context: Sequence[int]) -> float:
    """How sure who is asked first is of the token after a context."""
    return (draw([*context, FIRST], -3, -3) + 0.5) / VOCAB


class FakeStep:
    """What a run of a program is fed."""

    def __init__(self, program: "FakeProgram") -> None:
        self.program = program
        self.fed: list[Feed] = []

    def draw_each(self, feeds: Sequence[Feed], lives: Sequence[EagerLive]) -> bool:
        return False

    def feed(self, feed: Feed, live: EagerLive, amateur: Any = None) -> None:
        self.program.slots[feed.slot] = live
        self.fed.append(feed)

    def answers(self) -> list[list[Any]]:
        return [list(self.program._answer(feed)) for feed in self.fed]


class FakeProgram(FakeRunner):
    """A whole model, as the runner takes it. `below` holds what the layers below the exit have seen, its own pool what those
    above it have; a hidden row is its token."""

    config = SimpleNamespace(num_layers=LAYERS)
    inputs: Any = None

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.num_blocks = num_blocks
        self.below = FakeRunner(num_blocks, block_size)
        self.below.slots = self.slots

    def live(self, new: NewSlot) -> EagerLive:
        return EagerLive.of(new)

    def step(self) -> FakeStep:
        return FakeStep(self)

    def run(self, step: FakeStep, span: Span, rows: Any = None, keep: bool = False) -> Any:
        """Tokens of a feed come from the slot below the exit, and above it from the rows."""
        tokens: list[int] = []
        for feed in step.fed:
            known = self.slots[feed.slot].tokens[feed.start : feed.start + feed.count]
            tokens += [*known, *feed.nodes]
            if not span.first:
                self.below.write(feed)
        if span.first:
            tokens = [int(row[0]) for row in rows]
        if not 0 < span.layers <= AFTER:
            at = 0
            for feed in step.fed:
                for position in range(feed.start, feed.start + feed.count + len(feed.nodes)):
                    self._write(feed.slot, position, tokens[at])
                    at += 1
        return np.array(tokens, np.float32).reshape(-1, 1)

    def rearrange(self, plan: StepPlan) -> None:
        super().rearrange(plan)
        self.below.rearrange(plan)

    def kept(self) -> NativeStoredRows:
        return NativeStoredRows(self.num_blocks, self.block_size, 1)


class AskedFirst(FakeProgram):
    """Who may write before the whole model does: a smaller model, or, over the `below` of another one, an exit of it."""

    def _answer(self, feed: Feed) -> Answers:
        context = self._known(feed.slot, feed.start + feed.count)
        return tuple(self._one(feed, want, [*context, FIRST]) for want in feed.wants)

    def _top(self, feed: Feed, want: Any, context: list[int], node: int) -> Ranked:
        sure = confidence(context[:-1])
        return Ranked((0, 1), (math.log(sure), math.log((1 - sure) / 2)))


class Head(AskedFirst):
    """An exit's head: it reads what the layers below have seen, and writes nothing."""

    inputs = SimpleNamespace(at_exit=lambda number, rows: rows, chains=False)

    def __init__(self, target: FakeProgram) -> None:
        super().__init__(target.num_blocks, target.block_size)
        self.pool, self.slots = target.below.pool, target.slots

    def run(self, step: FakeStep, span: Span, rows: Any = None, keep: bool = False) -> Any:
        return rows

    def rearrange(self, plan: StepPlan) -> None:
        """The pool is the target's."""


def with_an_exit(config: EngineConfig, depth: int, speculation: Speculation | None) -> Engine:
    target = FakeProgram(config.cache.num_blocks, config.cache.block_size)
    runner: Any = Runner(target, leaves=Exit(Span(AFTER), Head(target)))
    runner.reserve(UPPER)
    return _engine(runner, config, depth, speculation, KVGroup(UPPER, layers=(AFTER,)))


def with_a_smaller_model(config: EngineConfig, depth: int, speculation: Speculation | None) -> Engine:
    sizes = config.cache.num_blocks, config.cache.block_size
    runner: Any = Runner(FakeProgram(*sizes), leaves=AskedFirst(*sizes))
    return _engine(runner, config, depth, speculation, KVGroup(CASCADE), KVGroup(UPPER))


def _engine(runner: Any, config: EngineConfig, depth: int, speculation: Speculation | None, *groups: KVGroup) -> Engine:
    return Engine(
        Deferred(runner, depth),
        config,
        vocab_size=VOCAB,
        eos_ids=frozenset({EOS}),
        groups=(TARGET, KVGroup(HIDDEN, "hidden"), *groups),
        speculation=speculation,
    )


class StagedJob(Job):
    """Plain, or written first by who is asked first. Some go on with what another one has written."""

    field = ""

    def __init__(self, rng: random.Random, number: int, prefixes: list[list[int]]) -> None:
        super().__init__(rng, number, prefixes)
        self.least = (0.0, 0.3, 0.6)[number // 2 % 3] if number % 2 == 0 else None
        if self.least is not None:
            self.params = self.params.replace(prompt_logprobs=None, **{self.field: self.least})
            prefixes[0] = self.prompt[:30] + self.expected()[0]
        elif len(self.prompt) > 30:
            self.arrives += 25

    def choose(self, tokens: list[int], seed: int, child: int) -> int:
        first = self.least is not None and len(tokens) > len(self.prompt) and confidence(tokens) >= self.least
        return draw([*tokens, FIRST] if first else tokens, seed, child)


class LeavingJob(StagedJob):
    """One that may leave by an exit."""

    field = "exit_threshold"


class CascadingJob(StagedJob):
    """One that a smaller model may write."""

    field = "cascade_threshold"
