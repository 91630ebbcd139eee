"""The loop on a model that computes nothing: how requests end, what becomes of children, what it says of its steps."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import pytest

from benchmarks.fake_model import VOCAB, Deferred, FakeRunner
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import AnyWant, Feed, KVGroup, RankLostError, Sample, StepOutput, StepPlan
from headrace.data.types import Child, Delta, Holding, Request, Sequence, Status
from headrace.decoding.base import Outputs, Strategy
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.engine.scheduler import Scheduler
from headrace.kv.blocks import BlockManager
from tests.property.drafters import Chain


@pytest.fixture
def engine() -> Engine:
    config = EngineConfig(SchedulerConfig(4, 8, 64), CacheConfig(12, 4))
    return Engine(Deferred(FakeRunner(12, 4), 1), config, vocab_size=VOCAB)


SHORT = SamplingParams(max_tokens=4)


class Told(Strategy):
    """Takes what it is told: `families` are the children of every sequence, step by step. Done when there are no more."""

    def __init__(self, families: list[list[list[Child]]], *, streams: bool = True, drops_failed: bool = False) -> None:
        self.families = families
        self.streams, self.drops_failed = streams, drops_failed

    def width(self, request: Request) -> int:
        return 4

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        return (Sample(),) if last else ()

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        return self.families.pop(0)

    def done(self, request: Request) -> bool:
        return not self.families


class Never:
    """A constraint that one token does not fit."""

    done = False

    def __init__(self, token: int) -> None:
        self.token, self.error = token, ""

    def copy(self) -> Self:
        return type(self)(self.token)

    def push(self, token: int) -> None:
        self.error = "it does not fit" if token == self.token else ""

    def masks(self, *draft: Any) -> bytes:
        return b""


def steps(engine: Engine) -> list[Delta]:
    """Everything that is delivered up to the end."""
    deltas: list[Delta] = []
    while engine.busy:
        deltas += engine.step()
        engine.check()
    return deltas


def test_outputs_that_are_open_when_a_strategy_is_done_have_stopped(engine: Engine) -> None:
    request = engine.add([1, 2], SHORT, strategy=Told([[[Child(token=3)]], [[Child(token=4)]]]))
    *_, last = steps(engine)
    assert (last.finish_reason, last.finished, last.error) == ("stop", True, None)
    assert [(seq.output, seq.text.finish_reason) for seq in request.finished] == [([3, 4], "stop")]


def test_an_abort_ends_open_outputs_with_their_tokens(engine: Engine) -> None:
    request = engine.add([1, 2], SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    engine.abort(request.id)
    (delta,) = engine.step()
    assert (delta.finish_reason, delta.finished, delta.error) == ("abort", True, None)
    assert [(len(seq.output), seq.text.finish_reason) for seq in request.finished] == [(1, "abort")]


def operations(work: Callable[[], object]) -> int:
    """How many bytecode operations a call takes."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_to_abort_many_requests_takes_work_in_proportion() -> None:
    """Also those at the end of the queue first. A look at all others for each of them made it minutes for 16,000 prompts."""

    def abort(count: int) -> int:
        engine = Engine(
            Deferred(FakeRunner(12, 4), 1), EngineConfig(SchedulerConfig(4, 8, 64), CacheConfig(12, 4)), vocab_size=VOCAB
        )
        names = [engine.add([1, 2], SHORT).id for _ in range(count)]

        def run() -> None:
            for name in reversed(names):
                engine.abort(name)
            assert sum(delta.finished for delta in engine.step()) == count

        return operations(run)

    assert abort(400) < 5 * abort(100)


def test_an_abort_in_flight_ends_with_its_step() -> None:
    config = EngineConfig(SchedulerConfig(4, 8, 64), CacheConfig(12, 4))
    engine = Engine(Deferred(FakeRunner(12, 4), 2), config, vocab_size=VOCAB)
    first, second = (engine.add(prompt, SamplingParams(max_tokens=9, ignore_eos=True)) for prompt in ([1] * 8, [2, 3]))
    engine.step()
    assert (first.in_flight, second.in_flight) == (False, True)
    engine.abort(second.id)
    assert second.status is Status.RUNNING
    (delta,) = (delta for delta in engine.step() if delta.request_id == second.id)
    assert (delta.finish_reason, delta.finished, delta.error) == ("abort", True, None)
    assert second.status is Status.FINISHED


def test_of_a_family_only_the_child_that_fails_its_grammar_is_dropped(engine: Engine) -> None:
    """The one in the middle: those before and behind it go on."""
    born = [Child(token=token) for token in (5, 7, 9)]
    strategy = Told([[born], [[Child(token=6)], [Child(token=8)]]], drops_failed=True)
    request = engine.add([1, 2], SHORT, strategy=strategy)
    request.seqs[0].decode.constraint = Never(7)
    engine.step()
    assert [seq.output for seq in request.seqs] == [[5], [9]]
    steps(engine)
    assert [seq.output for seq in request.finished] == [[5, 6], [9, 8]]
    assert request.error is None


def test_an_end_without_an_output_has_an_error(engine: Engine) -> None:
    engine.add([1, 2], SHORT, strategy=Told([[[]]], streams=False))
    (delta,) = steps(engine)
    assert delta.error == "nothing that may come is long enough; lower min_tokens"
    request = engine.add([1, 2], SHORT, strategy=Told([[[Child(token=7)]]], streams=False, drops_failed=True))
    request.seqs[0].decode.constraint = Never(7)
    (delta,) = steps(engine)
    assert delta.error == "it does not fit"


def test_fed_counts_the_tokens_of_a_step(engine: Engine) -> None:
    assert engine.fed == 0
    engine.add([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.step()
    assert engine.fed == 3
    engine.step()
    assert engine.fed == 1
    engine.step()
    assert engine.fed == 0


def test_the_outputs_of_a_request_come_in_the_same_steps(engine: Engine) -> None:
    """None goes ahead of the others, however many there are."""
    for n in (2, 3):
        engine.add([1, 2], SamplingParams(n=n, max_tokens=4, seed=0, ignore_eos=True))
        came = []
        while engine.busy:
            came.append(sorted(delta.index for delta in engine.step()))
        assert came == [list(range(n))] * 4


def test_children_of_a_preempted_request_advance_together() -> None:
    """While one of them computes the common prefix once more, none goes ahead."""
    config = EngineConfig(SchedulerConfig(8, 64, 64), CacheConfig(16, 4, prefix_caching=False))
    engine = Engine(Deferred(FakeRunner(16, 4), 1), config, vocab_size=VOCAB)
    params = SamplingParams(max_tokens=14, seed=0, ignore_eos=True)
    engine.add([1, 2, 3, 4, 5], params.replace(max_tokens=36))
    several = engine.add([1, 2, 3, 4, 6], params.replace(n=3))
    while engine.busy:
        came = sorted(delta.index for delta in engine.step() if delta.request_id == several.id and delta.token_ids)
        assert came in ([], [0, 1, 2])
    assert several.metrics.preemptions
    assert [len(seq.output) for seq in several.finished] == [14] * 3


def test_a_draft_takes_all_blocks_but_one_for_each_sequence() -> None:
    for blocks, drafted in ((3, 4), (2, 0)):
        config = EngineConfig(SchedulerConfig(4, 64, 64), CacheConfig(blocks, 4))
        speculation = Speculation([Chain(0, truth=1.0)], 64, gamma=4)
        engine = Engine(Deferred(FakeRunner(blocks, 4), 1), config, vocab_size=VOCAB, speculation=speculation)
        request = engine.add([1, 2, 3], SamplingParams(max_tokens=6, seed=0, ignore_eos=True))
        engine.step()
        (delta,) = engine.step()
        assert (request.metrics.drafted, delta.drafted, delta.accepted) == (drafted,) * 3


def test_a_preempted_request_waits() -> None:
    config = EngineConfig(SchedulerConfig(4, 64, 64), CacheConfig(6, 4))
    engine = Engine(Deferred(FakeRunner(6, 4), 1), config, vocab_size=VOCAB)
    both = [engine.add([1, 2, at], SamplingParams(max_tokens=18, seed=0, ignore_eos=True)) for at in range(2)]
    waited = False
    while engine.busy:
        engine.step()
        if both[1].metrics.preemptions and not waited:
            waited = True
            assert both[1].status is Status.WAITING
    assert waited
    assert [len(request.finished[0].output) for request in both] == [18, 18]


def test_moved_nodes_count_in_every_group_of_the_target() -> None:
    """A node is accepted past its sibling: what the target's feeds fill reaches as far as the path."""
    groups = (KVGroup("target"), KVGroup("hidden", kind="hidden"), KVGroup("draft", model=1))
    blocks = BlockManager(CacheConfig(8, 4), groups)
    seq = Sequence(0, [1, 2, 3, 7], 3, Holding(groups=0b011))
    blocks.grow(seq, 0, 5)
    seq.kv.computed = [3, 3, 2]
    Scheduler(SchedulerConfig(4, 64, 64), blocks).accept(seq, 3, (1,))
    assert seq.kv.moves == [(4, 3)]
    assert seq.kv.computed == [4, 4, 2]


@pytest.mark.parametrize("error", [RankLostError, RuntimeError])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_lost_rank_ends_the_engine_and_a_failed_step_does_not(error: type[Exception], depth: int) -> None:
    class Broken(FakeRunner):
        def execute(self, plan: StepPlan) -> StepOutput:
            raise error("rank 1 ended (signal SIGKILL)")

    config = EngineConfig(SchedulerConfig(4, 8, 64), CacheConfig(12, 4))
    engine = Engine(Deferred(Broken(12, 4), depth), config, vocab_size=VOCAB)
    engine.add([1, 2, 3], SHORT)
    if error is RankLostError:
        for _ in range(2):
            with pytest.raises(RankLostError, match="rank 1 ended"):
                engine.step()
    else:
        deltas = [delta for _ in range(6) for delta in engine.step()]
        assert [delta.error for delta in deltas] == ["the step failed: rank 1 ended (signal SIGKILL)"]
