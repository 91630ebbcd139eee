"""The loop under random load: every output equals a cache-less reference, the books balance after every step."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from benchmarks.fake_model import EOS, VOCAB, Deferred, FakeRunner, draw, reference
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import StepPlan
from headrace.data.types import Request, Sequence
from headrace.drafting.speculation import Speculation
from headrace.engine.admission import blocks_needed
from headrace.engine.engine import Engine
from headrace.engine.feeding import Flight
from headrace.engine.scheduler import Scheduler, _in_prefill
from headrace.kv.blocks import BlockManager

SEEDS = range(64)


class Job:
    """One request of the load, when it arrives, and what must come of it. `nodes`: of drafts of its own."""

    nodes = 0

    def __init__(self, rng: random.Random, number: int, prefixes: list[list[int]]) -> None:
        self.id = f"job-{number}"
        head = rng.choice(prefixes) if rng.random() < 0.6 else []
        tail = [rng.randrange(VOCAB - 1) for _ in range(rng.choice([1, 2, 5, 9, 30]))]
        self.prompt = head + tail
        self.arrives = rng.randrange(12)
        self.params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 3, 4]),
            max_tokens=rng.choice([1, 2, 7, 20, 40]),
            seed=rng.randrange(5),
            ignore_eos=rng.random() < 0.3,
            priority=rng.choice([0, 0, 0, 1]),
            prompt_logprobs=0 if rng.random() < 0.15 else None,
            prompt_logprobs_start=(0, len(self.prompt) // 2, len(self.prompt) - 1)[self.arrives % 3],
        )
        self.aborts = rng.randrange(5, 40) if rng.random() < 0.1 else None

    def add(self, engine: Engine) -> Request:
        return engine.add(self.prompt, self.params, request_id=self.id)

    def choose(self, tokens: list[int], seed: int, child: int) -> int:
        """The token that must come after these."""
        return draw(tokens, seed, child)

    def expected(self) -> list[list[int]]:
        stops = frozenset() if self.params.ignore_eos else frozenset({EOS})
        most = self.params.max_tokens or 0
        seed = self.params.seed or 0
        return [reference(self.prompt, seed, child, most, stops, self.choose) for child in range(self.params.n)]


def make_load(seed: int, make: type[Job] = Job) -> tuple[list[Job], EngineConfig, int]:
    """Jobs, and an engine whose pool just fits the largest of them when it shares what it can."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 8])
    prefixes = [[rng.randrange(VOCAB - 1) for _ in range(rng.choice([4, 16, 33, 90]))] for _ in range(2)]
    jobs = [make(rng, number, prefixes) for number in range(rng.choice([4, 8, 14]))]
    largest = max(blocks_needed(len(j.prompt), (j.params.max_tokens or 0) + j.nodes, j.params.n, block_size) for j in jobs)
    scheduler = SchedulerConfig(
        max_num_seqs=rng.choice([4, 6, 16]),
        max_num_batched_tokens=rng.choice([4, 7, 16, 64, 512]),
        max_model_len=256,
    )
    cache = CacheConfig(largest + rng.choice([0, 0, 1, 7]), block_size, prefix_caching=rng.random() < 0.7)
    return jobs, EngineConfig(scheduler, cache), rng.choice([1, 2, 3, 4])


def forbid_reuse(engine: Engine) -> None:
    """Fail when a block given up while a plan is made is handed out in that plan: its copies have no order."""
    blocks = engine.blocks
    begin, end, retire, take = blocks.begin, blocks.end, blocks.pool._retire, blocks.pool.take
    given: set[int] = set()
    making = [False]

    def watched_begin() -> None:
        begin()
        given.clear()
        making[0] = True

    def watched_end() -> None:
        making[0] = False
        end()

    def watched_retire(block: int) -> None:
        if making[0]:
            given.add(block)
        retire(block)

    def watched_take() -> int:
        block = take()
        assert not making[0] or block not in given, "a block was freed and reused within one plan"
        return block

    blocks.begin, blocks.end = watched_begin, watched_end  # type: ignore[method-assign]
    blocks.pool._retire, blocks.pool.take = watched_retire, watched_take  # type: ignore[method-assign]


def plain(config: EngineConfig, depth: int, speculation: Speculation | None) -> Engine:
    """An engine on a fake model."""
    executor = Deferred(FakeRunner(config.cache.num_blocks, config.cache.block_size), depth)
    return Engine(executor, config, vocab_size=VOCAB, eos_ids=frozenset({EOS}), speculation=speculation)


def run(
    seed: int,
    tamper: Callable[[Engine], None] | None = None,
    check: bool = True,
    speculation: Callable[[], Speculation | None] = lambda: None,
    make: type[Job] = Job,
    build: Callable[[EngineConfig, int, Speculation | None], Engine] = plain,
) -> tuple[list[Job], dict[str, dict[int, list[int]]], Engine]:
    """Drive the load to its end; returns the tokens of each job by child."""
    jobs, config, depth = make_load(seed, make)
    engine = build(config, depth, speculation())
    if tamper is not None:
        tamper(engine)
    forbid_reuse(engine)
    # Work in all, were every token fed alone and every job preempted as often as there are jobs.
    bound = 50 + sum((len(j.prompt) + (j.params.max_tokens or 0)) * j.params.n for j in jobs) * (len(jobs) + 1)
    outputs: dict[str, dict[int, list[int]]] = {job.id: {} for job in jobs}
    step = 0
    last = max(12, *(job.arrives for job in jobs))
    while step <= last or engine.busy:
        for job in jobs:
            if job.arrives == step:
                job.add(engine)
            if job.aborts == step:
                engine.abort(job.id)
        for delta in engine.step():
            outputs[delta.request_id].setdefault(delta.index, []).extend(delta.token_ids)
            assert delta.error is None, delta.error
        if check:
            engine.check()
        step += 1
        assert step < bound, "a request never ends"
    return jobs, outputs, engine


def wrong_outputs(jobs: list[Job], outputs: dict[str, dict[int, list[int]]]) -> list[str]:
    """The children whose output is not the reference's; of an aborted job, not a beginning of it."""
    found = []
    for job in jobs:
        for child, expected in enumerate(job.expected()):
            got = outputs[job.id].get(child, [])
            if got != (expected if job.aborts is None else expected[: len(got)]):
                found.append(f"{job.id} child {child}: {got}, not {expected}")
    return found


def assert_reference(jobs: list[Job], outputs: dict[str, dict[int, list[int]]]) -> None:
    assert not wrong_outputs(jobs, outputs)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_output_equals_the_reference(seed: int) -> None:
    jobs, outputs, engine = run(seed)
    assert_reference(jobs, outputs)
    assert engine.blocks.used == 0
    assert not engine.scheduler.requests


def test_the_loads_cover_every_scheduler_event() -> None:
    """Preemption, copy-on-write, prefix hits, forks that were preempted: all of it happens in these loads."""
    seen = {"preempted": 0, "forked and preempted": 0, "copies": 0, "hits": 0, "depth 2": 0, "mixed steps": 0, "chunks": 0}
    for seed in SEEDS:
        copies: list[int] = []
        requests: list = []

        def watch(engine: Engine, copies: list[int] = copies, requests: list = requests) -> None:
            submit = engine.executor.submit

            def counting(plan: StepPlan) -> object:
                copies.append(len(plan.copies))
                counts = [feed.count for feed in plan.feeds]
                seen["chunks"] += any(request.in_flight > 1 for request in engine.requests.values())
                seen["mixed steps"] += min(counts) == 1 and max(counts) > 1
                return submit(plan)

            engine.executor.submit = counting  # type: ignore[method-assign, assignment]
            add = engine.add

            def remembering(*args: object, **kwargs: object) -> object:
                request = add(*args, **kwargs)  # type: ignore[arg-type]
                requests.append(request)
                return request

            engine.add = remembering  # type: ignore[method-assign, assignment]

        _, _, engine = run(seed, watch, check=False)
        seen["depth 2"] += engine.executor.depth > 1
        seen["copies"] += sum(copies)
        seen["preempted"] += engine.scheduler.preemptions
        seen["forked and preempted"] += sum(r.metrics.preemptions > 0 and r.width > 1 for r in requests)
        seen["hits"] += sum(r.metrics.cached_tokens > 0 for r in requests)
        assert all(r.metrics.cached_tokens < len(r.prompt) for r in requests), "more hits than tokens"
    assert all(count >= 10 for count in seen.values()), seen


def test_prompt_scores_survive_chunks_and_preemption() -> None:
    scored = 0
    for seed in SEEDS:
        requests: list = []

        def watch(engine: Engine, requests: list = requests) -> None:
            add = engine.add
            engine.add = lambda *a, **k: requests.append(add(*a, **k))  # type: ignore[method-assign]

        run(seed, watch, check=False)
        for request in requests:
            if request.params.prompt_logprobs is None or request.aborted:
                continue
            scored += 1
            expected = [-float(draw(request.prompt[:end], 0, 0)) for end in range(1, len(request.prompt))]
            start = max(request.params.prompt_logprobs_start, 1)
            assert [s.logprob for s in request.prompt_logprobs[start:]] == expected[start - 1 :]
            assert request.prompt_logprobs[:start] == [None] * min(start, len(request.prompt_logprobs))
    assert scored > 20


# -- negative controls: each breaks one rule, and the loads above must notice ------------------------------------------


def symptom(tamper: Callable[[Engine], None], **more: Any) -> str:
    """How the loads fail under a broken engine: "wrong output", or the first line of the assertion. Empty if they pass.

    more: further arguments of `run`, each a function of the seed.
    """
    for seed in SEEDS:
        try:
            jobs, outputs, _ = run(seed, tamper, check=False, **{name: make(seed) for name, make in more.items()})
        except AssertionError as error:
            return str(error).splitlines()[0]
        if wrong_outputs(jobs, outputs):
            return "wrong output"
    return ""


def no_copy_on_write(engine: Engine) -> None:
    blocks = engine.blocks
    written = blocks._written
    blocks._written = lambda seq, start, end: range(0)  # type: ignore[method-assign, assignment]
    assert written is not None


def publish_too_early(engine: Engine) -> None:
    """Blocks are offered when they are handed out, before anything was computed into them."""
    blocks, grow = engine.blocks, engine.blocks.grow

    def early(seq: Sequence, start: int, end: int) -> list[tuple[int, int, int]]:
        copies = grow(seq, start, end)
        computed, seq.kv.computed = seq.kv.computed, [end]
        full = len(seq.tokens) // blocks.block_size * blocks.block_size
        seq.kv.computed = [min(full, len(seq.kv.tables[0]) * blocks.block_size)]
        blocks.publish(seq)
        seq.kv.computed = computed
        return copies

    blocks.grow = early  # type: ignore[method-assign]


def siblings_rematch_separately(engine: Engine) -> None:
    """After a preemption nobody waits for a prefix that another sequence is computing."""
    engine.scheduler.feeding._promised = lambda seq, promises, most: False  # type: ignore[method-assign, assignment]


def reuse_within_a_plan(engine: Engine) -> None:
    """A block given up while a step is scheduled is handed out again in that step."""
    blocks: BlockManager = engine.blocks
    begin = blocks.begin

    def at_once() -> None:
        begin()
        blocks.pool._scheduling = False

    blocks.begin = at_once  # type: ignore[method-assign]


def skip_a_token_between_chunks(engine: Engine) -> None:
    """The chunk behind a chunk under way starts one token too late."""
    feeding = engine.scheduler.feeding
    add = feeding._add

    def adding(request: Request, seq: Sequence, start: int, end: int, flight: Flight) -> None:
        add(request, seq, start, end, flight)
        seq.wire.fed += 1

    feeding._add = adding  # type: ignore[method-assign]


def feed_before_the_answer(engine: Engine) -> None:
    """A sequence is fed again while its step is under way, before its next token is known."""
    scheduler = engine.scheduler
    scheduler._lane = lambda: sorted(scheduler.running, key=_in_prefill)  # type: ignore[method-assign]
    scheduler._feed_next_chunk = scheduler._feed  # type: ignore[method-assign]


def drop_the_needy(engine: Engine) -> None:
    """A request that ran short of blocks is not tried again while others run."""
    scheduler: Scheduler = engine.scheduler
    scheduler._preempt_after = lambda request: False  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (no_copy_on_write, "wrong output"),
        (publish_too_early, "wrong output"),
        (reuse_within_a_plan, "a block was freed and reused"),
        (drop_the_needy, "the engine can feed no request"),
        (skip_a_token_between_chunks, "wrong output"),
    ],
)
def test_a_broken_engine_is_caught(tamper: Callable[[Engine], None], expected: str) -> None:
    assert symptom(tamper).startswith(expected)


def test_a_token_that_is_fed_before_its_step_has_ended_is_caught() -> None:
    with pytest.raises((AssertionError, IndexError)):
        assert symptom(feed_before_the_answer) == ""


def preempted_family(tamper: Callable[[Engine], None] | None) -> tuple[Job, list[list[int]]]:
    """Four siblings share a long prompt in a pool that just fits them; an urgent request grows and throws them out."""
    rng = random.Random(5)
    family, urgent = Job(rng, 0, [[1]]), Job(rng, 1, [[2]])
    family.prompt = [rng.randrange(VOCAB - 1) for _ in range(64)]
    family.params = SamplingParams(n=4, max_tokens=12, seed=1, ignore_eos=True, priority=1)
    blocks = blocks_needed(64, 12, 4, 4)
    urgent.prompt = [rng.randrange(VOCAB - 1) for _ in range(40)]
    urgent.params = SamplingParams(max_tokens=60, seed=2, ignore_eos=True)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=256)
    config = EngineConfig(scheduler, CacheConfig(blocks, 4))
    engine = Engine(Deferred(FakeRunner(blocks, 4), 1), config, vocab_size=VOCAB, eos_ids=frozenset({EOS}))
    if tamper is not None:
        tamper(engine)
    engine.add(urgent.prompt, urgent.params, request_id=urgent.id)
    request = engine.add(family.prompt, family.params, request_id=family.id)
    outputs: list[list[int]] = [[] for _ in range(4)]
    for _ in range(200):
        for delta in engine.step():
            if delta.request_id == family.id:
                assert delta.error is None, f"the family never came back: {delta.error}"
                outputs[delta.index] += delta.token_ids
        if not engine.busy:
            break
    assert not engine.busy, "the family never came back"
    assert request.metrics.preemptions >= 1
    return family, outputs


def test_a_preempted_family_resumes() -> None:
    family, outputs = preempted_family(None)
    assert outputs == family.expected()


def test_siblings_that_rematch_separately_never_come_back() -> None:
    with pytest.raises(AssertionError, match="never came back"):
        preempted_family(siblings_rematch_separately)


# -- plans are plain data ----------------------------------------------------------------------------------------------


def test_plans_and_outputs_survive_msgpack() -> None:
    class OverTheWire(Deferred):
        def submit(self, plan: StepPlan):  # type: ignore[no-untyped-def]
            return super().submit(msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan))

        def run_until(self, ticket):  # type: ignore[no-untyped-def]
            super().run_until(ticket)
            ticket.output = msgspec.msgpack.decode(msgspec.msgpack.encode(ticket.output), type=type(ticket.output))

    for seed in range(8):
        jobs, config, depth = make_load(seed)
        runner = FakeRunner(config.cache.num_blocks, config.cache.block_size)
        engine = Engine(OverTheWire(runner, depth), config, vocab_size=VOCAB, eos_ids=frozenset({EOS}))
        outputs: dict[str, dict[int, list[int]]] = {job.id: {} for job in jobs}
        for job in jobs:
            job.aborts = None
            engine.add(job.prompt, job.params, request_id=job.id)
        while engine.busy:
            for delta in engine.step():
                outputs[delta.request_id].setdefault(delta.index, []).extend(delta.token_ids)
        assert_reference(jobs, outputs)
