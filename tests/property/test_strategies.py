"""Beams, groups, contrastive search, contrastive decoding and samples in one loop, on pools so small that they push each other
out.

In torch every output equals a reference without a cache; on the native core it equals the same request alone, bit for bit.
"""

import random
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import pytest

from headrace import core
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.data.plan import HIDDEN, Feed
from headrace.data.types import Request
from headrace.decoding.beam import BeamSearch
from headrace.engine.admission import blocks_needed
from headrace.engine.engine import Engine
from headrace.models.base import Model
from tests.beams import DifferentError, assert_the_books_show, fork_after_free, no_copy_on_write, reference, same, unchecked
from tests.contrast_engines import engine_of, native_engine_of
from tests.contrast_reference import contrastive_decoding, contrastive_search
from tests.tiny import VOCAB, run_alone, tiny_config, tiny_model, tokens_of

STOPS = frozenset(range(80, VOCAB))
KINDS: dict[str, BeamSearchParams | SamplingParams] = {
    "beams": BeamSearchParams(beam_width=4, n=4, max_tokens=7),
    "groups": BeamSearchParams(beam_width=4, n=3, max_tokens=7, groups=2, diversity_penalty=0.7),
    "search": SamplingParams(penalty_alpha=0.6, top_k=4, max_tokens=7),
    "decoding": SamplingParams(contrastive_beta=0.8, temperature=0.8, max_tokens=9),
    "samples": SamplingParams(n=3, max_tokens=9),
    "greedy": SamplingParams(temperature=0.0, max_tokens=9),
}
# In torch, where the reference takes its time, those of the first 24 loads in which something is pushed out.
SEEDS = {"torch": [0, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 23], "native": [*range(40)]}
MANY = [*range(60)]
BACKENDS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(not core.available(), reason=core.reason() or "native")),
]


@lru_cache
def models(backend: str) -> tuple[Model, Model]:
    if backend == "torch":
        return tiny_model(), tiny_model(tiny_config(num_layers=1, hidden_size=16), seed=5)
    from tests.tiny_native import as_bfloat16, native_model

    return native_model("llama"), as_bfloat16(tiny_model(tiny_config(num_layers=1), seed=5))


class Job:
    """One request of a load, when it arrives, and whether it is given up."""

    def __init__(self, rng: random.Random, number: int, shared: list[int]) -> None:
        self.kind = list(KINDS)[number % len(KINDS)]
        self.params = KINDS[self.kind]
        if isinstance(self.params, SamplingParams):
            self.params = self.params.replace(seed=number, priority=rng.choice([0, 0, 1]))
        head = shared[: rng.choice([0, 0, 9, 21])]
        self.prompt = head + rng.choices(range(80), k=rng.choice([1, 4, 11]))
        self.arrives = rng.randrange(9)
        self.aborts = rng.randrange(4, 20) if rng.random() < 0.08 else None

    def add(self, engine: Engine) -> Request:
        if isinstance(self.params, BeamSearchParams):
            return engine.add(self.prompt, self.params.sampling(), strategy=BeamSearch(self.params))
        return engine.add(self.prompt, self.params)

    def blocks(self, size: int) -> int:
        beams = isinstance(self.params, BeamSearchParams)
        width = self.params.beam_width if beams else self.params.n  # type: ignore[union-attr]
        nodes = 0 if beams or not self.params.penalty_alpha else self.params.top_k  # type: ignore[union-attr]
        return blocks_needed(len(self.prompt), (self.params.max_tokens or 0) + nodes, width, size)

    def expected(self, backend: str) -> list[list[int]]:
        """By a reference without a cache; on the native core, alone."""
        expert, amateur = models(backend)
        if backend == "native":
            engine = native_engine_of(expert, amateur, blocks=400)
            engine.eos_ids = STOPS
            return drive(engine, [self])[0]
        if isinstance(self.params, BeamSearchParams):
            return reference(expert, self.prompt, self.params, STOPS)
        if self.kind == "search":
            return [ended(contrastive_search(expert, self.prompt, self.params))]
        if self.kind == "decoding":
            return [ended(contrastive_decoding(expert, amateur, self.prompt, self.params))]
        return [ended(run_alone(expert, self.prompt, self.params, child)) for child in range(self.params.n)]


def ended(tokens: list[int]) -> list[int]:
    """Up to the first end token."""
    return next((tokens[: at + 1] for at, token in enumerate(tokens) if token in STOPS), tokens)


def texts(job: Job, request: Request) -> list[list[int]]:
    if isinstance(job.params, BeamSearchParams):
        return [seq.output for seq, _ in request.strategy.results(request)]
    return tokens_of(request)


def drive(engine: Engine, jobs: list[Job], requests: list[Request] | None = None) -> list[list[list[int]]]:
    """Every job's outputs; the books are checked after every step."""
    made: dict[Job, Request] = {}
    for step in range(3000):
        for job in jobs:
            if job not in made and (job.arrives <= step or len(jobs) == 1):
                made[job] = job.add(engine)
            if job in made and job.aborts == step and len(jobs) > 1:
                engine.abort(made[job].id)
        for delta in engine.step():
            assert delta.error is None, delta.error
        engine.check()
        if len(made) == len(jobs) and not engine.busy:
            break
    assert not engine.busy, "the engine does not come to an end"
    assert engine.blocks.used == 0
    if requests is not None:
        requests += [made[job] for job in jobs]
    return [texts(job, made[job]) for job in jobs]


def load(backend: str, seed: int) -> tuple[list[Job], Engine]:
    """Jobs, and an engine whose pool just fits the largest of them."""
    rng = random.Random(seed)
    shared = rng.choices(range(80), k=21)
    jobs = [Job(rng, number + seed, shared) for number in range(9)]
    make, size = (engine_of, 4) if backend == "torch" else (native_engine_of, 16)
    blocks = max(job.blocks(size) for job in jobs) + rng.choice([0, 0, 1, 3])
    engine = make(*models(backend), blocks=blocks * size // 4, budget=rng.choice([9, 17, 64]))
    engine.eos_ids = STOPS
    return jobs, engine


@lru_cache(maxsize=512)
def wanted(backend: str, kind: str, seed: int | None, prompt: tuple[int, ...]) -> list[list[int]]:
    job = Job(random.Random(0), list(KINDS).index(kind), [])
    job.prompt = list(prompt)
    if isinstance(job.params, SamplingParams):
        job.params = job.params.replace(seed=seed)
    return job.expected(backend)


def assert_expected(backend: str, jobs: list[Job], found: list[list[list[int]]]) -> None:
    for job, outputs in zip(jobs, found, strict=True):
        if job.aborts is None:
            seed = job.params.seed if isinstance(job.params, SamplingParams) else None
            same(outputs, wanted(backend, job.kind, seed, tuple(job.prompt)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_output_equals_its_reference(backend: str) -> None:
    all_is_as_it_must_be(backend, SEEDS[backend])


@pytest.mark.slow
def test_every_output_of_many_more_loads_is() -> None:
    all_is_as_it_must_be("torch", MANY)


def all_is_as_it_must_be(backend: str, seeds: list[int]) -> None:
    pushed_out: Counter[str] = Counter()
    for seed in seeds:
        jobs, engine = load(backend, seed)
        requests: list[Request] = []
        assert_expected(backend, jobs, drive(engine, jobs, requests))
        for job, request in zip(jobs, requests, strict=True):
            pushed_out[job.kind] += request.metrics.preemptions
            pushed_out["hits"] += request.metrics.cached_tokens > 0
    assert all(pushed_out[kind] >= 2 for kind in [*KINDS, "hits"]), pushed_out


# -- negative controls: each breaks one rule, and the same loads must notice -------------------------------------------------


def last_prompt_token_only(engine: Engine) -> None:
    """Contrast with the tokens from the prompt's last on, as where a prefix hit has left no hidden states."""
    kept = engine.executor.runner.kept[HIDDEN]  # type: ignore[attr-defined]

    def closest(feed: Feed, table: list[int]) -> list[float]:
        count = feed.start + feed.count
        (prompt_len,) = [s.prompt_len for r in engine.requests.values() for s in r.seqs if s.wire.slot == feed.slot]
        rows = kept.read(table, 0, count + len(feed.nodes))
        found: list[float] = kept.nearest(rows[prompt_len - 1 : count], rows[count:])
        return found

    kept.closest = closest


def as_many_as_the_width(engine: Engine) -> None:
    """Beam search looks at the W best continuations alone, so end tokens crowd out live hypotheses."""
    add = engine.add

    def adding(*args: object, **more: object) -> Request:
        request = add(*args, **more)  # type: ignore[arg-type]
        beam = request.strategy
        if isinstance(beam, BeamSearch):
            candidates = beam._candidates
            beam._candidates = lambda *a: candidates(*a)[: beam.group_width]  # type: ignore[method-assign]
        return request

    engine.add = adding  # type: ignore[method-assign]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tamper", [no_copy_on_write, as_many_as_the_width, last_prompt_token_only])
def test_outputs_reveal_a_broken_engine(backend: str, tamper: Callable[[Engine], None]) -> None:
    with pytest.raises(DifferentError):
        play_all(backend, unchecked(tamper))


@pytest.mark.parametrize("backend", BACKENDS)
def test_block_counts_reveal_blocks_that_are_freed_too_early(backend: str) -> None:
    assert_the_books_show(lambda: play_all(backend, fork_after_free))


def play_all(backend: str, tamper: Callable[[Engine], None]) -> None:
    for seed in SEEDS[backend]:
        jobs, engine = load(backend, seed)
        tamper(engine)
        assert_expected(backend, jobs, drive(engine, jobs))
