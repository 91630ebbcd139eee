"""Several steps under way at once: requests that only need a token are shared out among them, and what steps cost is learnt."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.fake_model import VOCAB, Deferred, DeferredTicket, FakeRunner, reference
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import StepOutput, StepPlan
from headrace.drafting.ngram import PromptLookup
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from tests.tiny import finish, tokens_of

LENGTH = 24
CONFIG = EngineConfig(SchedulerConfig(16, 64, 128), CacheConfig(96, 4))


class Watched(Deferred):
    """Keeps, at every submission, the slots of each plan that is under way."""

    def __init__(self, depth: int, seconds: float = 0.0) -> None:
        super().__init__(FakeRunner(CONFIG.cache.num_blocks, CONFIG.cache.block_size), depth)
        self.under_way: list[list[set[int]]] = []
        self.seconds = seconds

    def submit(self, plan: StepPlan) -> DeferredTicket:
        ticket = super().submit(plan)
        self.under_way.append([{feed.slot for feed in each.feeds} for each, _ in self._queue])
        return ticket

    def run_until(self, ticket: DeferredTicket) -> None:
        super().run_until(ticket)
        assert isinstance(ticket.output, StepOutput)
        ticket.output.seconds = self.seconds


def play(count: int, depth: int, tamper: Callable[[Engine], Any] = lambda engine: None) -> list[list[set[int]]]:
    """What was under way while `count` requests went on together, and each became what it is alone."""
    executor = Watched(depth)
    engine = Engine(executor, CONFIG, vocab_size=VOCAB)
    tamper(engine)
    jobs = [([7 + at, 3, at, 5], at) for at in range(count)]
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    requests = [engine.add(prompt, params.replace(seed=seed)) for prompt, seed in jobs]
    finish(engine)
    for request, (prompt, seed) in zip(requests, jobs, strict=True):
        assert tokens_of(request) == [reference(prompt, seed, 0, LENGTH, frozenset())]
    return executor.under_way


@pytest.mark.parametrize(("count", "depth"), [(6, 2), (7, 2), (6, 3), (2, 2)])
def test_steps_of_disjoint_sequences_overlap(count: int, depth: int) -> None:
    under_way = play(count, depth)
    assert all(sum(map(len, plans)) == len(set().union(*plans)) for plans in under_way), "a sequence is in two plans"
    full = [plans for plans in under_way if len(plans) == depth]
    assert len(full) > LENGTH
    most = -(-count // depth)
    assert sum(all(len(plan) <= most for plan in plans) for plans in full) > LENGTH


def test_a_step_that_takes_all_is_noticed() -> None:
    """Control: one plan feeds everybody, and nothing is left for a second."""

    def all_at_once(engine: Engine) -> None:
        engine.scheduler.depth = 1

    assert sum(len(plans) == 2 for plans in play(6, 2, all_at_once)) <= 2


def test_one_step_at_a_time_feeds_all() -> None:
    assert max(len(plans[0]) for plans in play(6, 1)) == 6


@pytest.mark.parametrize("seconds", [0.0, 0.25])
@pytest.mark.parametrize("depth", [1, 3])
def test_costs_are_learned_from_measured_steps(depth: int, seconds: float) -> None:
    speculation = Speculation([PromptLookup()], CONFIG.scheduler.max_model_len, 2)
    learnt: list[float] = []
    speculation.record_step = lambda plan, output: learnt.append(output.seconds)  # type: ignore[method-assign]
    engine = Engine(Watched(depth, seconds), CONFIG, vocab_size=VOCAB, speculation=speculation)
    engine.add([1, 2, 1, 2, 1], SamplingParams(max_tokens=6, ignore_eos=True))
    finish(engine)
    assert set(learnt) == ({seconds} if seconds else set())
