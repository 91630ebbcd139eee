"""Number of candidates that beam search and contrastive search request: exactly those that they use."""

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
import pytest

from headrace import core
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.data.plan import Feed, Top, Want
from headrace.data.types import Request, Sequence
from headrace.decoding.beam import BeamSearch
from headrace.decoding.contrastive import ContrastiveSearch
from headrace.engine.engine import Engine
from headrace.models.base import Model
from tests.beams import CASES, beams, reference
from tests.contrast_engines import engine_of, native_engine_of
from tests.tiny import finish, tiny_config, tiny_engine, tiny_model, tokens_of

VOCAB = 40
BACKENDS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(not core.available(), reason=core.reason() or "native")),
]


@lru_cache
def model(backend: str, seed: int = 0) -> Model:
    made = tiny_model(tiny_config(vocab_size=VOCAB), seed=seed)
    if backend == "torch":
        return made
    from tests.tiny_native import as_bfloat16

    return as_bfloat16(made)


def engines(backend: str) -> Callable[..., Engine]:
    if backend == "torch":
        return tiny_engine
    from tests.tiny_native import native_engine

    return native_engine


def ends(rng: random.Random, count: int) -> frozenset[int]:
    return frozenset(rng.sample(range(VOCAB), count))


def everything(monkeypatch: pytest.MonkeyPatch, strategy: type) -> None:
    """Have every token offered."""
    want = strategy.want  # type: ignore[attr-defined]

    def unbounded(self: Any, *seen: Any) -> tuple[Want, ...]:
        return tuple(msgspec.structs.replace(asked, k=VOCAB, live=False) for asked in want(self, *seen))

    monkeypatch.setattr(strategy, "want", unbounded)


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_the_number_of_candidates_does_not_depend_on_the_stop_tokens(count: int) -> None:
    stops = frozenset(range(count))
    for params, k in (
        (BeamSearchParams(beam_width=16).sampling(), 16),
        (BeamSearchParams(beam_width=12, groups=3).sampling(), 4 + 2 * 8),
        (SamplingParams(penalty_alpha=0.5, top_k=6, min_tokens=2), 6),
    ):
        strategy = ContrastiveSearch() if params.beam is None else BeamSearch(params.beam)
        request = Request("r", [1], params, 0, strategy, 0, stop_ids=stops)
        (want,) = strategy.want(request, Sequence(0, [1], 1), Feed(0, 0, 1), True)
        assert isinstance(want, Top)
        assert (want.k, want.live) == (k, bool(count))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_beams_lose_nothing_by_the_bound(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypotheses and scores are, bit for bit, those of beams that are offered the whole vocabulary."""
    rng = random.Random(name)
    jobs = [(rng.choices(range(VOCAB), k=5), ends(rng, count), seed) for seed, count in enumerate((1, 5, 20, 36, 39))]

    def run_beams() -> list[Any]:
        return [beams(model(backend, seed), prompt, CASES[name], stops, engines(backend)) for prompt, stops, seed in jobs]

    bounded = run_beams()
    everything(monkeypatch, BeamSearch)
    assert bounded == run_beams()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_the_tokens_that_go_on_they_would(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: ends crowd out what goes on where the best tokens alone are listed."""
    rng = random.Random(3)
    jobs = [(rng.choices(range(VOCAB), k=5), ends(rng, 30), seed) for seed in range(6)]
    want = BeamSearch.want

    def plain(self: BeamSearch, *seen: Any) -> tuple[Want, ...]:
        return tuple(msgspec.structs.replace(asked, live=False) for asked in want(self, *seen))  # as many of all

    def run_beams() -> list[Any]:
        return [beams(model(backend, seed), prompt, CASES["never"], stops, engines(backend)) for prompt, stops, seed in jobs]

    right = run_beams()
    monkeypatch.setattr(BeamSearch, "want", plain)
    assert right != run_beams()


@pytest.mark.parametrize("seed", range(4))
def test_groups_with_many_ends_equal_the_reference(seed: int) -> None:
    """Earlier groups take ends, too, and what they took costs later ones."""
    rng = random.Random(seed)
    stops, prompt = ends(rng, 34), rng.choices(range(VOCAB), k=4)
    params = BeamSearchParams(beam_width=8, n=8, max_tokens=6, groups=4, diversity_penalty=5.0, early_stopping="never")
    outputs = beams(model("torch", seed), prompt, params, stops)
    assert [tokens for tokens, _ in outputs] == reference(model("torch", seed), prompt, params, stops)


def searched(backend: str, seed: int, prompt: list[int], params: SamplingParams) -> list[int]:
    make = engine_of if backend == "torch" else native_engine_of
    engine = make(model(backend, seed), model(backend, seed))
    request = engine.add(prompt, params)
    finish(engine)
    return tokens_of(request)[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_contrastive_search_loses_nothing_by_the_bound(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    jobs = []
    for seed, count in enumerate((1, 12, 30, 37)):
        stops = tuple(sorted(ends(rng, count)))
        params = SamplingParams(penalty_alpha=0.6, top_k=4, max_tokens=9, min_tokens=seed * 2, stop_token_ids=stops)
        jobs.append((seed, rng.choices(range(VOCAB), k=6), params))
    bounded = [searched(backend, *job) for job in jobs]
    everything(monkeypatch, ContrastiveSearch)
    assert bounded == [searched(backend, *job) for job in jobs]
