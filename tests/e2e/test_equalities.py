"""An output does not depend on batch, chunking, prefix hits, preemption or siblings: token for token, in float64.

Exactness class: bitwise on back ends whose kernels are row-invariant; on torch in float64 the tokens are equal.
"""

import itertools
import random
from typing import Any

import pytest

from headrace.data.params import SamplingParams
from headrace.models.base import Model
from headrace.ops.keys import key
from tests.tiny import VOCAB, finish, run_alone, tiny_config, tiny_engine, tiny_model, tokens_of
from tests.ulps import rounded_once

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt2")
SETTINGS = (
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=4, max_tokens=12),
    SamplingParams(temperature=1.2, min_p=0.05, repetition_penalty=1.3, frequency_penalty=0.4, seed=5, max_tokens=12),
    SamplingParams(temperature=1.0, typical_p=0.8, no_repeat_ngram=2, presence_penalty=0.5, seed=6, max_tokens=12),
    SamplingParams(temperature=0.9, seed=7, max_tokens=12, logit_bias={3: 5.0}, bad_words=((4,), (5, 6))),
)
KNOWN: dict[Any, list[list[int]]] = {}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model(tiny_config(request.param))


def load(seed: int = 1, count: int = 8) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    lengths = [1, 3, 4, 5, 17, 33, 40, 64]
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths[:count]]
    return [(prompt, SETTINGS[i % len(SETTINGS)]) for i, prompt in enumerate(prompts)]


def expected(model: Model, jobs: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """The tokens of each request in an engine of its own, computed once."""
    key = (model, run_alone, repr(jobs))
    if key not in KNOWN:
        KNOWN[key] = [run_alone(model, prompt, params) for prompt, params in jobs]
    return KNOWN[key]


@pytest.mark.parametrize("budget", [256, 16, 5])
def test_batched_and_chunked_equal_single(model: Model, budget: int) -> None:
    jobs = load()
    engine = tiny_engine(model, budget=budget, blocks=128)
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    finish(engine)
    assert [tokens_of(request)[0] for request in requests] == expected(model, jobs)


def test_a_prefix_hit_equals_a_miss(model: Model) -> None:
    jobs = load()
    engine = tiny_engine(model, blocks=128)
    for round_ in range(2):
        requests = [engine.add(prompt, params) for prompt, params in jobs]
        finish(engine)
        assert [tokens_of(request)[0] for request in requests] == expected(model, jobs)
        hits = sum(request.metrics.cached_tokens for request in requests)
        assert (hits > 100) == (round_ == 1), hits


def test_preempted_equals_not_preempted(model: Model) -> None:
    jobs = load()
    engine = tiny_engine(model, blocks=24)
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    finish(engine)
    assert engine.scheduler.preemptions > 0
    assert [tokens_of(request)[0] for request in requests] == expected(model, jobs)


@pytest.mark.parametrize("blocks", [64, 14])
def test_child_i_of_n_equals_the_single_run_with_its_key(model: Model, blocks: int) -> None:
    prompt = [5, 9, 2, 44, 3, 17, 60]
    engine = tiny_engine(model, blocks=blocks)
    requests = [engine.add(prompt, SamplingParams(n=4, temperature=1.0, seed=seed, max_tokens=9)) for seed in (11, 12)]
    finish(engine)
    for seed, request in zip((11, 12), requests, strict=True):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=9)
        assert tokens_of(request) == [run_alone(model, prompt, params, child) for child in range(4)]
        assert len({tuple(tokens) for tokens in tokens_of(request)}) > 1


def test_logprobs_do_not_depend_on_the_batch(model: Model) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=2)

    def scores(budget: int, others: int) -> tuple[list[float], list[float]]:
        engine = tiny_engine(model, budget=budget)
        for other in range(others):
            engine.add([other + 8] * 11, SamplingParams(max_tokens=6, seed=1))
        request = engine.add(prompt, params)
        drawn: list[float] = []
        while engine.busy:
            for delta in engine.step():
                if delta.request_id == request.id:
                    drawn += [entry.logprob for entry in delta.logprobs]
        return drawn, [entry.logprob for entry in request.prompt_logprobs if entry is not None]

    alone = scores(64, 0)
    assert len(alone[0]) == 6
    assert len(alone[1]) == 6
    crowded = scores(6, 5)
    assert rounded_once(crowded[0] + crowded[1], alone[0] + alone[1])


def test_noise_that_depends_on_the_order_of_draws_is_caught(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: noise from a stream that all requests share makes an output depend on its neighbours."""
    jobs = [(prompt, SETTINGS[1]) for prompt, _ in load()]
    right = expected(model, jobs)
    draws = itertools.count()
    monkeypatch.setattr("headrace.backends.eager.step.key", lambda seed, child: key(seed, next(draws)))
    engine = tiny_engine(model, blocks=128)
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    finish(engine)
    assert [tokens_of(request)[0] for request in requests] != right
