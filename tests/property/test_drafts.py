"""Drafts in the loop, under random load: whatever is proposed, every output equals the reference without a draft."""

from collections.abc import Callable

import msgspec
import pytest

from benchmarks.fake_model import VOCAB, Deferred, FakeRunner, reference
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import Drawn, Feed, StepOutput, StepPlan
from headrace.data.types import Request, RequestMetrics, Sequence
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from tests.property.drafters import Chain, Guessing
from tests.property.test_engine import assert_reference, run, symptom

SEEDS = range(24)
DRAFTERS = {"trees": Guessing, "chains": Chain}


def speculation(kind: str, seed: int) -> Callable[[], Speculation]:
    return lambda: Speculation([DRAFTERS[kind](seed)], max_model_len=256, gamma=6)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_output_equals_the_reference(kind: str, seed: int) -> None:
    jobs, outputs, engine = run(seed, speculation=speculation(kind, seed))
    assert_reference(jobs, outputs)
    assert engine.blocks.used == 0
    assert not engine.scheduler.requests


def test_the_loads_cover_every_draft_event() -> None:
    """Drafts are accepted, rejected, cut short, moved, and met by preemption, forks and a plan under way."""
    seen = dict.fromkeys(("accepted", "rejected", "moved", "cut", "preempted", "forked", "depth 2"), 0)
    for seed in SEEDS:
        requests: list = []

        def watch(engine: Engine, requests: list = requests) -> None:
            (drafter,) = engine.speculation.drafters
            add, submit, draft = engine.add, engine.executor.submit, drafter.draft
            engine.add = lambda *a, **k: requests.append(add(*a, **k))  # type: ignore[method-assign]
            proposed: dict[int, int] = {}

            def drafting(*who, draft=draft, proposed=proposed):  # type: ignore[no-untyped-def]
                made = draft(*who)
                proposed[who[1].wire.slot] = len(made.tokens) if made else 0
                return made

            def counting(plan: StepPlan) -> object:
                seen["moved"] += len(plan.moves)
                seen["cut"] += sum(0 < len(feed.nodes) < proposed.get(feed.slot, 0) for feed in plan.feeds)
                return submit(plan)

            drafter.draft = drafting  # type: ignore[method-assign]
            engine.executor.submit = counting  # type: ignore[method-assign, assignment]

        _, _, engine = run(seed, watch, check=False, speculation=speculation("trees", seed))
        for request in requests:
            seen["accepted"] += request.metrics.accepted
            seen["rejected"] += request.metrics.drafted - request.metrics.accepted
            seen["preempted"] += request.metrics.preemptions > 0 and request.metrics.accepted > 0
            seen["forked"] += request.width > 1 and request.metrics.accepted > 0
            seen["depth 2"] += engine.executor.depth > 1 and request.metrics.accepted > 0
    assert all(count >= 10 for count in seen.values()), seen


def small_engine(speculation: Speculation | None) -> Engine:
    config = EngineConfig(SchedulerConfig(4, 64, 256), CacheConfig(64, 4))
    return Engine(Deferred(FakeRunner(64, 4), 1), config, vocab_size=VOCAB, speculation=speculation)


def outcome(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], RequestMetrics]:
    request = engine.add(prompt, params)
    while engine.busy:
        engine.step()
        engine.check()
    return request.finished[0].output, request.metrics


def test_drafts_save_steps() -> None:
    """A drafter that is always right: a step gives as many tokens as were drafted, and one."""
    params = SamplingParams(max_tokens=40, seed=1)
    tokens, metrics = outcome(small_engine(Speculation([Chain(0, truth=1.0)], 256, gamma=4)), [1, 2, 3], params)
    assert tokens == reference([1, 2, 3], 1, 0, 40, frozenset())
    assert (metrics.steps, metrics.drafted, metrics.accepted) == (9, 31, 31)  # one token with the prompt, then 7 * 5 and 4


@pytest.mark.parametrize("broken", [False, True])
def test_kv_of_rejected_nodes_is_not_reused(broken: bool) -> None:
    """A conversation goes on where an answer ended, in the middle of a block that rejected nodes were written to."""
    wrong = 0
    for seed in range(12):
        engine = small_engine(Speculation([Guessing(seed, truth=0.6)], 256, gamma=6))
        if broken:
            publish_unverified_blocks(engine)
        prompt = [seed, 2, 3]
        answer, _ = outcome(engine, prompt, SamplingParams(max_tokens=13, seed=1))
        again = [*prompt, *answer, 5]
        follow_up, metrics = outcome(engine, again, SamplingParams(max_tokens=8, seed=1))
        assert metrics.cached_tokens >= 8
        wrong += follow_up != reference(again, 1, 0, 8, frozenset())
    assert (wrong > 0) == broken


def publish_unverified_blocks(engine: Engine) -> None:
    """Blocks are offered as soon as nodes were written to them, under the tokens that came out in place of the draft's."""
    settle = engine.children._accept_path

    def publish(request: Request, seq: Sequence, length: int, path: tuple[int, ...]) -> None:
        settle(request, seq, length, path)
        computed, seq.kv.computed = seq.kv.computed, [min(len(seq.tokens), len(seq.kv.tables[0]) * engine.blocks.block_size)]
        engine.blocks.publish(seq)
        seq.kv.computed = computed

    engine.children._accept_path = publish  # type: ignore[method-assign]


# -- negative controls: each breaks one rule of verification, and the loads above must notice --------------------------


def a_walk_that_accepts_a_wrong_child(engine: Engine) -> None:
    runner = engine.executor.runner  # type: ignore[attr-defined]
    answer = runner._answer

    def wrong(feed: Feed):  # type: ignore[no-untyped-def]
        answers = answer(feed)
        out = answers[0] if answers else None
        if feed.nodes and isinstance(out, Drawn) and not out.path:
            out.path, out.tokens = (0,), (feed.nodes[0], *out.tokens)
        return answers

    runner._answer = wrong


def nothing_is_moved(engine: Engine) -> None:
    """K/V that was accepted off its place stays where it is."""
    submit = engine.executor.submit

    def without_moves(plan: StepPlan) -> object:
        plan.moves = []
        return submit(plan)

    engine.executor.submit = without_moves  # type: ignore[method-assign, assignment]


def nothing_is_rolled_back(engine: Engine) -> None:
    """What a rejected node wrote stays: the token that comes in its place is not written over it."""
    runner = engine.executor.runner  # type: ignore[attr-defined]
    execute, write = runner.execute, runner._write
    stale: set[tuple[int, int]] = set()

    def keeping(slot: int, position: int, token: int) -> None:
        if (slot, position) not in stale:
            write(slot, position, token)
        stale.discard((slot, position))

    def remembering(plan: StepPlan) -> StepOutput:
        out = execute(plan)
        stale.clear()
        for feed in plan.feeds:
            stale.update((feed.slot, feed.start + feed.count + i) for i in range(len(feed.nodes)))
        return out

    runner.execute, runner._write = remembering, keeping


@pytest.mark.parametrize("tamper", [a_walk_that_accepts_a_wrong_child, nothing_is_moved, nothing_is_rolled_back])
def test_a_broken_verification_is_caught(tamper: Callable[[Engine], None]) -> None:
    assert symptom(tamper, speculation=lambda seed: speculation("trees", seed)) == "wrong output"


def test_plans_with_drafts_are_plain_data() -> None:
    def watch(engine: Engine) -> None:
        runner = engine.executor.runner  # type: ignore[attr-defined]
        execute = runner.execute

        def over_the_wire(plan: StepPlan) -> StepOutput:
            sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
            return msgspec.msgpack.decode(msgspec.msgpack.encode(execute(sent)), type=StepOutput)

        runner.execute = over_the_wire

    for seed in range(4):
        jobs, outputs, _ = run(seed, watch, speculation=speculation("trees", seed))
        assert_reference(jobs, outputs)
