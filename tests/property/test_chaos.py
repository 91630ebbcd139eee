"""Hooks, rows, steps and drafters fail at random under random load: nobody else notices, nothing is lost, nothing hangs."""

from collections import Counter
from collections.abc import Callable

import pytest

from benchmarks.fake_model import EOS, VOCAB, Deferred, FakeRunner
from headrace import core
from headrace.data.config import EngineConfig
from headrace.data.params import SamplingParams
from headrace.data.types import Request
from headrace.decoding.processors import ProcessorError
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.engine.feeding import Flight
from tests.property import test_strategies as strategies
from tests.property.chaos import HOOKS, BrokenError, Chaos, FaultyDrafter
from tests.property.drafters import Guessing
from tests.property.methods import AnyJob
from tests.property.test_engine import forbid_reuse, make_load

SEEDS = range(48)
STEPS = 4000  # a load takes a few hundred
STEPS_FAIL = ("step before", "step after", "retry before", "retry after")


class Plain(AnyJob):
    """As any job; what is aborted is of no interest here."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.aborts = None


def play(seed: int, tamper: Callable[[Engine], None] | None = None) -> tuple[Chaos, FaultyDrafter]:
    """One load on the fake model, two thirds of whose requests are broken at random. An AssertionError says what is wrong."""
    jobs, config, depth = make_load(seed, Plain)
    drafter = FaultyDrafter(Guessing(seed), seed)
    runner = FakeRunner(config.cache.num_blocks, config.cache.block_size)
    speculation = Speculation([drafter], max_model_len=256, gamma=6) if seed % 3 else None
    engine = Engine(Deferred(runner, depth), config, vocab_size=VOCAB, eos_ids=frozenset({EOS}), speculation=speculation)
    chaos = Chaos(seed)
    chaos.install(engine, lambda request: int(request.id.split("-")[1]) % 3 != 2)
    if tamper is not None:
        tamper(engine)
    forbid_reuse(engine)
    outputs: dict[str, dict[int, list[int]]] = {job.id: {} for job in jobs}
    ended: Counter[str] = Counter()
    errors: dict[str, str] = {}
    for step in range(STEPS):
        for job in jobs:
            if job.arrives == step:
                job.add(engine)
        for delta in engine.step():
            outputs[delta.request_id].setdefault(delta.index, []).extend(delta.token_ids)
            ended[delta.request_id] += delta.finished
            if delta.error is not None:
                errors[delta.request_id] = delta.error
        engine.check()
        if step > 12 and not engine.busy:
            break
    assert not engine.busy, "a request never ends"
    assert ended == Counter({job.id: 1 for job in jobs}), "an end is missing, or told twice"
    assert set(errors) <= chaos.struck, f"others failed: { {name: errors[name] for name in set(errors) - chaos.struck} }"
    for job in jobs:
        for child, expected in enumerate(job.expected()):
            got = outputs[job.id].get(child, [])
            wanted = expected[: len(got)] if job.id in errors else expected
            assert got == wanted, f"{job.id} child {child}"
    assert_nothing_is_lost(engine, runner.slots, config)
    return chaos, drafter


def assert_nothing_is_lost(engine: Engine, slots: object, config: EngineConfig) -> None:
    """Blocks and slots have come back, and the runner holds none but that of a request that comes now."""
    assert engine.blocks.used == 0
    assert not engine.requests
    assert not engine.scheduler.requests
    assert sorted(engine.scheduler._slots) == list(range(config.scheduler.max_num_seqs))
    held = engine.scheduler._freed_slots
    assert set(slots) <= set(held), "the runner keeps a slot that nobody will give back"  # type: ignore[call-overload]


@pytest.mark.parametrize("seed", SEEDS)
def test_failures_change_no_other_request(seed: int) -> None:
    play(seed)


def test_every_kind_of_failure_occurs() -> None:
    """In these loads every hook, all kinds of steps, rows and drafters have failed, and most requests have not."""
    seen: Counter[str] = Counter()
    for seed in SEEDS[:32]:
        chaos, drafter = play(seed)
        seen.update(chaos.hooks)
        seen["drafter"] += drafter.raised
        seen["chunk behind a failed one"] += chaos.stale
    others = {"row", "drafter", "chunk behind a failed one"}
    everything = {*HOOKS, *STEPS_FAIL, *others} - {"results", "draft"}  # these two only of strategies on real models
    assert all(seen[what] >= 2 for what in everything), seen


# -- negative controls -------------------------------------------------------------------------------------------------------


def unguarded(hook: str) -> Callable[[Engine], None]:
    """An engine that guards all hooks but one."""

    def tamper(engine: Engine) -> None:
        ask = engine._call_hook

        def asking(request: Request, what: Callable, *args: object) -> object:
            return what(*args) if what.__name__ == hook else ask(request, what, *args)

        engine._call_hook = asking  # type: ignore[method-assign]

    return tamper


def a_flight_known_too_late(engine: Engine) -> None:
    """The flight is remembered when it is submitted, not before the hooks run, and they are not guarded."""
    launch = engine._launch

    def late() -> None:
        flights = engine._flights
        known = len(flights)
        try:
            launch()
        except Exception:
            while len(flights) > known:
                flights.pop()
            raise

    engine._launch = late  # type: ignore[method-assign]
    unguarded("_set_wants")(engine)


def a_failed_step_ends_its_requests(engine: Engine) -> None:
    """Nobody is tried again."""
    fail = engine.scheduler.fail

    def ending(flight: Flight) -> None:
        flight.retry = True
        for work in flight.works:
            work.request.error = "the step failed"
        fail(flight)

    engine.scheduler.fail = ending  # type: ignore[method-assign]


def a_failed_step_is_taken_for_done(engine: Engine) -> None:
    """What a failed step was fed counts as computed, and its requests go on where they are."""
    scheduler = engine.scheduler

    def fail(flight: Flight) -> None:
        for work in flight.works:
            work.seq.kv.computed[0] = work.feed.start + work.feed.count

    scheduler.fail = fail  # type: ignore[method-assign]


def a_chunk_behind_a_failed_one_counts(engine: Engine) -> None:
    """The chunks of a prompt that were under way behind a failed chunk are used as if it had not failed."""
    scheduler = engine.scheduler
    land = scheduler.land

    def landing(flight: Flight) -> None:
        for work in flight.works:
            work.stale = False
        land(flight)

    scheduler.land = landing  # type: ignore[method-assign]


def slots_of_a_failed_step_are_forgotten(engine: Engine) -> None:
    engine.scheduler.fail = lambda flight: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "tamper",
    [
        unguarded("_set_wants"),
        unguarded("_commit"),
        a_flight_known_too_late,
        a_failed_step_ends_its_requests,
        a_failed_step_is_taken_for_done,
        a_chunk_behind_a_failed_one_counts,
        slots_of_a_failed_step_are_forgotten,
    ],
)
def test_a_broken_boundary_is_caught(tamper: Callable[[Engine], None]) -> None:
    # A hook's error comes out of `step`, or the load is not as it must be.
    with pytest.raises((BrokenError, ProcessorError, AssertionError)):
        play_all(tamper)


def play_all(tamper: Callable[[Engine], None]) -> None:
    for seed in SEEDS:
        play(seed, tamper)


# -- natively ----------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not core.available(), reason=core.reason() or "native")
def test_failures_change_no_other_request_on_the_native_core() -> None:
    """Beams, contrastive search and decoding, samples and greedy on the native core, broken at random."""
    seen: Counter[str] = Counter()
    for seed in range(20):
        jobs, engine = strategies.load("native", seed)
        chaos = Chaos(seed, rate=0.03, step_rate=0.015)
        seen.update(play_natively(jobs, engine, chaos))
    everything = {"want", "select", "done", "results", "draft", *STEPS_FAIL, "row"}
    assert all(seen[what] for what in everything), seen


def play_natively(jobs: list[strategies.Job], engine: Engine, chaos: Chaos) -> dict[str, int]:
    numbers: dict[str, int] = {}
    chaos.install(engine, lambda request: numbers.setdefault(request.id, len(numbers)) % 2 == 1)
    made: dict[strategies.Job, Request] = {}
    errors: set[str] = set()
    for step in range(STEPS):
        for job in jobs:
            if job not in made and job.arrives <= step:
                made[job] = job.add(engine)
        errors |= {delta.request_id for delta in engine.step() if delta.error is not None}
        engine.check()
        if len(made) == len(jobs) and not engine.busy:
            break
    assert not engine.busy, "a request never ends"
    assert errors <= chaos.struck
    chaos.rate = 0.0  # from here on the tests ask
    for job, request in made.items():
        if request.id not in errors:
            own = job.params.seed if isinstance(job.params, SamplingParams) else None
            assert strategies.texts(job, request) == strategies.wanted("native", job.kind, own, tuple(job.prompt)), job.kind
    slots = engine.executor.runner.slots  # type: ignore[attr-defined]
    assert_nothing_is_lost(engine, slots, engine.config)
    return chaos.hooks
