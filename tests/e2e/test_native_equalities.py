"""The engine's equalities on the native core, bitwise: an output depends on its request alone."""

import random
from collections.abc import Iterator

import pytest

from headrace.backends.native.program import NativeProgram
from headrace.data.params import SamplingParams
from headrace.engine.engine import Engine
from headrace.models.base import Model
from tests.e2e import test_equalities as equalities
from tests.tiny import VOCAB, finish, tokens_of
from tests.tiny_native import native_alone, native_engine, native_model

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt2", "olmo2", "arcee", "glm4", "granite", "ministral3", "exaone4")


@pytest.fixture(autouse=True)
def natively(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """What test_equalities builds is native; afterwards every engine it made is asked whether it was."""
    engines: list[Engine] = []

    def engine(model: Model, **settings: int) -> Engine:
        engines.append(native_engine(model, **settings))
        return engines[-1]

    monkeypatch.setattr(equalities, "tiny_engine", engine)
    monkeypatch.setattr(equalities, "run_alone", native_alone)
    monkeypatch.setattr("headrace.backends.eager.step.key", None)  # torch must have no part in this
    yield engines
    assert engines
    assert all(isinstance(each.executor.runner.programs[0], NativeProgram) for each in engines)  # type: ignore[attr-defined]


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> Model:
    return native_model(request.param)


@pytest.mark.parametrize("budget", [256, 16, 5])
def test_batched_and_chunked_equal_single(model: Model, budget: int) -> None:
    equalities.test_batched_and_chunked_equal_single(model, budget)


def test_a_prefix_hit_equals_a_miss(model: Model) -> None:
    equalities.test_a_prefix_hit_equals_a_miss(model)


def test_preempted_equals_not_preempted(model: Model) -> None:
    jobs = [([number + 3] * 14, params.replace(max_tokens=40)) for number, (_, params) in enumerate(equalities.load(3))]
    engine = equalities.tiny_engine(model, blocks=32)  # 8 of 16 tokens, for requests that grow to 4 each
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    finish(engine)
    assert engine.scheduler.preemptions > 0
    assert [tokens_of(request)[0] for request in requests] == equalities.expected(model, jobs)


@pytest.mark.parametrize("blocks", [64, 16])
def test_child_i_of_n_equals_the_single_run_with_its_key(model: Model, blocks: int) -> None:
    equalities.test_child_i_of_n_equals_the_single_run_with_its_key(model, blocks)


def test_logprobs_do_not_depend_on_the_batch(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest, "approx", lambda value, abs: value)  # bitwise
    equalities.test_logprobs_do_not_depend_on_the_batch(model)


def test_noise_that_depends_on_the_order_of_draws_is_caught(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the lot: a key taken from a stream that all requests share."""
    jobs = [(prompt, equalities.SETTINGS[1]) for prompt, _ in equalities.load(1)]
    right = equalities.expected(model, jobs)
    numbers = iter(range(10**6))
    monkeypatch.setattr("headrace.backends.native.live.key", lambda seed, child: (next(numbers), seed))
    engine = equalities.tiny_engine(model, blocks=128)
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    finish(engine)
    assert [tokens_of(request)[0] for request in requests] != right


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_equal_single_runs(seed: int) -> None:
    """Arrivals, shared prefixes, n, small budgets and small pools, all at once; the books balance after every step."""
    rng = random.Random(seed)
    model = native_model("llama")
    forms = {"quantize": rng.choice(["", "int8"]), "kv_dtype": rng.choice(["auto", "int8", "int4"])}
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.choice([16, 40]))] for _ in range(2)]
    jobs = []
    for _ in range(10):
        prompt = rng.choice([*prefixes, []]) + [rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 20]))]
        n, length = rng.choice([1, 1, 2, 3]), rng.choice([1, 8, 20])
        jobs.append((rng.randrange(12), prompt, SamplingParams(n=n, max_tokens=length, seed=rng.randrange(9), top_p=0.9)))
    engine = native_engine(model, budget=rng.choice([4, 16, 64]), blocks=rng.choice([60, 80]), seqs=4, **forms)
    requests = {}
    for step in range(2000):
        for number, (arrives, prompt, params) in enumerate(jobs):
            if arrives == step:
                requests[number] = engine.add(prompt, params)
        for delta in engine.step():
            assert delta.error is None, delta.error
        engine.check()
        if step > 12 and not engine.busy:
            break
    equalities.tiny_engine(model)  # the fixture asks for one
    for number, (_, prompt, params) in enumerate(jobs):
        single = [native_alone(model, prompt, params, child, **forms) for child in range(params.n)]
        assert tokens_of(requests[number]) == single, f"seed {seed} job {number}"
    assert isinstance(engine.executor.runner.programs[0], NativeProgram)  # type: ignore[attr-defined]
