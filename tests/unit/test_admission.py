"""What may not enter the loop is refused in one line that says what to change."""

import pytest

from benchmarks.fake_model import VOCAB, Deferred, FakeRunner, reference
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import AnyWant, Drawn, Feed, Sample, StepPlan
from headrace.data.types import Child, Draft, Request, Sequence
from headrace.decoding.base import Outputs, Strategy
from headrace.decoding.prompts import Scoring
from headrace.engine.admission import AdmissionError, blocks_needed
from headrace.engine.engine import Engine


@pytest.fixture
def engine() -> Engine:
    config = EngineConfig(SchedulerConfig(4, 8, 64), CacheConfig(12, 4))
    return Engine(Deferred(FakeRunner(12, 4), 1), config, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty; give at least one token"),
        ([1] * 64, {}, "the prompt has 64 tokens and the context holds 64, the answer included; shorten"),
        ([1, VOCAB], {}, "prompt token 61 is not in the vocabulary"),
        ([1, -1], {}, "prompt token -1 is not in the vocabulary"),
        ([1], {"stop_token_ids": (99,)}, "stop_token_ids names token 99, but the model's ids end at 60"),
        ([1], {"logit_bias": {99: 1.0}}, "logit_bias names token 99"),
        ([1], {"bad_words": ((1, 99),)}, "bad_words names token 99"),
        ([1], {"allowed_token_ids": (99,)}, "allowed_token_ids names token 99"),
        ([1], {"stop": ("end",)}, "stop strings need a tokenizer"),
        ([1], {"n": 5}, "the request needs 5 sequences at once and the engine runs 4; lower n"),
        ([1] * 40, {"max_tokens": 20}, "may need 15 KV blocks of 4 tokens and the pool has 12; lower n or max_tokens"),
        ([1] * 20, {"n": 4, "max_tokens": 12}, "may need 17 KV blocks"),
    ],
)
def test_a_refusal_names_the_setting_to_change(engine: Engine, prompt: list[int], params: dict, message: str) -> None:
    with pytest.raises(AdmissionError) as caught:
        engine.add(prompt, SamplingParams(**params))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not engine.busy
    engine.check()


def test_a_request_id_in_use_is_refused(engine: Engine) -> None:
    engine.add([1], SamplingParams(), request_id="a")
    with pytest.raises(AdmissionError, match="'a' is in use"):
        engine.add([1], SamplingParams(), request_id="a")


def test_a_request_at_the_admission_bound_runs(engine: Engine) -> None:
    """The bound of admission is enough: with the pool to itself the largest request comes to its end."""
    for prompt, n, most in ((30, 1, 19), (20, 2, 14), (8, 4, 10), (7, 4, 9), (9, 3, 12)):
        if blocks_needed(prompt, most, n, 4) > 12:
            continue
        request = engine.add(list(range(prompt)), SamplingParams(n=n, max_tokens=most, seed=0, ignore_eos=True))
        for _ in range(200):
            engine.step()
            engine.check()
        assert not engine.busy
        assert [len(seq.output) for seq in request.finished] == [most] * n


def test_a_failed_processor_fails_only_its_request() -> None:
    class Broken:
        scope = "pointwise"

        def apply(self, logits: object, history: object, paths: object) -> object:
            raise RuntimeError("I am broken")

    class NoScope:
        def apply(self, logits: object, history: object, paths: object) -> object:
            return logits

    config = EngineConfig(SchedulerConfig(4, 8, 64), CacheConfig(12, 4))
    engine = Engine(Deferred(FakeRunner(12, 4), 1), config, vocab_size=VOCAB)
    with pytest.raises(AdmissionError, match="scope"):
        engine.add([1], SamplingParams(), processors=(NoScope(),))  # type: ignore[arg-type]
    broken = Broken()
    broken.scope = "stateful"
    with pytest.raises(AdmissionError, match="set n to 1"):
        engine.add([1], SamplingParams(n=2), processors=(broken,))  # type: ignore[arg-type]
    unlucky = engine.add([1, 2], SamplingParams(max_tokens=5), processors=(broken,))  # type: ignore[arg-type]
    beside = engine.add([1, 2], SamplingParams(max_tokens=5, seed=3))
    errors = run_to_end(engine)
    assert errors == {unlucky.id: "ProcessorError: logit processor Broken raised RuntimeError: I am broken"}
    assert beside.finished[0].output == reference([1, 2], 3, 0, 5, frozenset())
    assert engine.blocks.used == 0


def run_to_end(engine: Engine) -> dict[str, str]:
    """The errors of all that is queued."""
    errors = {}
    for _ in range(200):
        errors.update({delta.request_id: delta.error for delta in engine.step() if delta.error is not None})
        engine.check()
        if not engine.busy:
            return errors
    raise AssertionError("a request never ends")


def test_a_failed_step_is_retried_one_request_at_a_time() -> None:
    """What one of two requests was fed cannot be trusted any more than what the other was: each is tried again, alone."""
    runner = FakeRunner(12, 4)
    engine = Engine(Deferred(runner, 1), EngineConfig(SchedulerConfig(4, 8, 64), CacheConfig(12, 4)), vocab_size=VOCAB)
    both = [engine.add([1, 2], SamplingParams(max_tokens=5)).id for _ in range(2)]
    execute = runner.execute

    def broken(plan: StepPlan) -> object:
        raise RuntimeError("out of memory")

    runner.execute = broken  # type: ignore[method-assign, assignment]
    ended = [{delta.request_id: delta.error for delta in engine.step()} for _ in range(3)]
    assert ended == [{}, *({one: "the step failed: out of memory"} for one in both)]
    runner.execute = execute  # type: ignore[method-assign]
    assert not engine.busy


def test_unnamed_requests_get_names_that_are_free(engine: Engine) -> None:
    taken = [engine.add([1], SamplingParams(), request_id=f"request-{number}").id for number in range(3)]
    names = [engine.add([1], SamplingParams()).id for _ in range(3)]
    assert len({*taken, *names}) == 6


def test_a_prefix_hit_is_counted_once() -> None:
    """A request that shares two blocks waits for room while others run: it says two blocks, not two for each pass."""
    config = EngineConfig(SchedulerConfig(4, 64, 64), CacheConfig(10, 4))
    engine = Engine(Deferred(FakeRunner(10, 4), 1), config, vocab_size=VOCAB)
    shared = [1, 2, 3, 4, 5, 6, 7, 8]
    engine.add([*shared, 9], SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    late = engine.add([*shared, *range(10, 38)], SamplingParams(max_tokens=1))
    waited = 0
    while engine.busy:
        engine.step()
        waited += late.metrics.scheduled is None
    assert waited > 5
    assert late.metrics.cached_tokens == 8


def test_the_work_of_a_step_does_not_grow_with_the_queue() -> None:
    """Of strategies with drafts of their own only those are asked that this step could admit."""

    class Asked(Strategy):
        streams = True
        calls = 0

        def width(self, request: Request) -> int:
            return 1

        def nodes(self, request: Request) -> int:
            return 1

        def draft(self, request: Request, seq: Sequence) -> Draft | None:
            Asked.calls += 1
            return None

        def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
            return (Sample(seq.decode.index),) if last else ()

        def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
            return [[Child(token=answer.tokens[0])] for _, (answer,) in outputs if isinstance(answer, Drawn)]

        def done(self, request: Request) -> bool:
            return False

    config = EngineConfig(SchedulerConfig(4, 8, 64), CacheConfig(12, 4))
    engine = Engine(Deferred(FakeRunner(12, 4), 1), config, vocab_size=VOCAB)
    for _ in range(300):
        engine.add([1, 2], SamplingParams(max_tokens=4, ignore_eos=True), strategy=Asked())
    for _ in range(10):
        Asked.calls = 0
        engine.step()
        assert Asked.calls <= 8, "4 that run, and 4 that could be admitted"


def test_a_failed_step_commits_nothing_and_the_engine_continues() -> None:
    runner = FakeRunner(12, 4)
    config = EngineConfig(SchedulerConfig(4, 8, 64), CacheConfig(12, 4))
    engine = Engine(Deferred(runner, 1), config, vocab_size=VOCAB)
    engine.add([1, 2, 3], SamplingParams(max_tokens=5), request_id="unlucky")
    execute = runner.execute

    def broken(plan: StepPlan) -> object:
        runner.slots.apply(plan)
        raise RuntimeError("out of memory")

    runner.execute = broken  # type: ignore[method-assign, assignment]
    assert engine.step() == []  # it is tried once more
    (delta,) = engine.step()
    assert delta.finish_reason == "error"
    assert delta.error == "the step failed: out of memory"
    engine.check()
    assert engine.blocks.used == 0
    runner.execute = execute  # type: ignore[method-assign]
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=5, seed=0))
    while engine.busy:
        engine.step()
    assert len(request.finished[0].output) == 5


def test_a_text_of_the_whole_context_is_scored(engine: Engine) -> None:
    scored = engine.add([1] * 48, SamplingParams(prompt_logprobs=0, max_tokens=1), strategy=Scoring())
    assert run_to_end(engine) == {}
    assert len(scored.prompt_logprobs) == 48
    config = EngineConfig(SchedulerConfig(4, 8, 48), CacheConfig(12, 4))
    full = Engine(Deferred(FakeRunner(12, 4), 1), config, vocab_size=VOCAB)
    scored = full.add([1] * 48, SamplingParams(prompt_logprobs=0, max_tokens=1), strategy=Scoring())
    assert run_to_end(full) == {}
    assert len(scored.prompt_logprobs) == 48
    with pytest.raises(AdmissionError, match="has 48 tokens and the context holds 48"):
        full.add([1] * 48, SamplingParams(max_tokens=1))
    with pytest.raises(AdmissionError, match="has 49 tokens"):
        full.add([1] * 49, SamplingParams(prompt_logprobs=0, max_tokens=1), strategy=Scoring())
