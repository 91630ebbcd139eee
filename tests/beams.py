"""Beam search in tests: requests, a reference without a cache, a mixed load, and engines that are broken on purpose."""

import random
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch

from headrace.data.params import SamplingParams
from headrace.data.types import Request
from headrace.decoding.beam import BeamSearch, BeamSearchParams
from headrace.engine.engine import Engine
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.ops.context import FeedRows, build
from tests.tiny import finish, tiny_config, tiny_engine, tiny_model, tokens_of

EOS = 3


def log_probs(model: Model, tokens: list[int]) -> tuple[float, ...]:
    """Next-token log-probabilities, from the whole text with no KV cache; once for each text."""
    return _log_probs(model, tuple(tokens))


@lru_cache(maxsize=4096)
def _log_probs(model: Model, tokens: tuple[int, ...]) -> tuple[float, ...]:
    pool = KVPool(model.config, 1, len(tokens), torch.float64)
    return tuple(model(build(pool, [FeedRows(list(tokens), [0])]))[-1].log_softmax(-1).tolist())


def score_of(model: Model, prompt: list[int], output: list[int]) -> float:
    return sum(log_probs(model, prompt + output[:at])[token] for at, token in enumerate(output))


def add_beam(engine: Engine, prompt: list[int], params: BeamSearchParams) -> Request:
    return engine.add(prompt, params.sampling(), strategy=BeamSearch(params))


def beams(
    model: Model,
    prompt: list[int],
    params: BeamSearchParams,
    stop_ids: frozenset[int] = frozenset(),
    make: Callable[..., Engine] = tiny_engine,
    **engine: int,
) -> list[tuple[list[int], float]]:
    """(tokens, cumulative log-prob) of the n best."""
    running = make(model, **engine)
    running.eos_ids = stop_ids
    request = add_beam(running, prompt, params)
    finish(running)
    return [(seq.output, seq.decode.score) for seq, _ in request.strategy.results(request)]


def reference(model: Model, prompt: list[int], params: BeamSearchParams, stop_ids: frozenset[int]) -> list[list[int]]:
    """Beam search by recomputing everything, groups included, written for clarity alone."""
    width = params.beam_width // params.groups
    live = [[([], 0.0)] for _ in range(params.groups)]
    finished: list[list[tuple[list[int], float]]] = [[] for _ in range(params.groups)]
    ended = [False] * params.groups

    def rank(hypothesis: tuple[list[int], float]) -> float:
        return params.normalised(hypothesis[1], len(hypothesis[0]))

    for step in range(1, params.max_tokens + 1):
        taken: dict[int, int] = {}
        for group in range(params.groups):
            if ended[group]:
                continue
            options = []
            for place, (tokens, score) in enumerate(live[group]):
                for token, logprob in enumerate(log_probs(model, prompt + tokens)):
                    if token in stop_ids and len(tokens) < params.min_tokens:
                        continue
                    cost = params.diversity_penalty * taken.get(token, 0)
                    options.append((-(score + logprob - cost), place, token, score + logprob))
            options.sort()
            going: list[tuple[list[int], float]] = []
            for order, (_, place, token, score) in enumerate(options):
                hypothesis = (live[group][place][0] + [token], score)
                if token in stop_ids or step == params.max_tokens:
                    if order < width:
                        finished[group].append(hypothesis)
                        taken[token] = taken.get(token, 0) + 1
                elif len(going) < width:
                    going.append(hypothesis)
                    taken[token] = taken.get(token, 0) + 1
                if len(going) == width or (step == params.max_tokens and order >= width):
                    break
            finished[group] = sorted(finished[group], key=rank, reverse=True)[:width]
            live[group] = going
            if not going:
                ended[group] = True
            elif len(finished[group]) == width:
                longest = params.early_stopping == "never" and params.length_penalty > 0
                best = params.normalised(max(s for _, s in going), params.max_tokens if longest else step)
                ended[group] = params.early_stopping is True or best <= rank(finished[group][-1])
    everyone = sorted((h for pool in finished for h in pool), key=rank, reverse=True)
    return [tokens for tokens, _ in everyone[: params.n]]


CASES = {
    "plain": BeamSearchParams(beam_width=4, n=4, max_tokens=8),
    "early": BeamSearchParams(beam_width=4, n=4, max_tokens=12, early_stopping=True),
    "never": BeamSearchParams(beam_width=3, n=3, max_tokens=8, early_stopping="never", length_penalty=2.0),
    "short": BeamSearchParams(beam_width=3, n=2, max_tokens=8, length_penalty=-1.0),
    "gnmt": BeamSearchParams(beam_width=3, n=3, max_tokens=8, length_rule="gnmt", length_penalty=0.6),
    "groups": BeamSearchParams(beam_width=6, n=6, max_tokens=8, groups=3, diversity_penalty=0.7),
    "pairs": BeamSearchParams(beam_width=4, n=3, max_tokens=8, groups=2, diversity_penalty=3.0, early_stopping=True),
}


class DifferentError(AssertionError):
    """An output is not what it must be."""


def same(found: object, expected: object) -> None:
    """Raises DifferentError."""
    if found != expected:
        raise DifferentError(f"{found} and not {expected}")


def mixed(
    tamper: Callable[[Engine], None] | None = None,
    make: Callable[..., Engine] = tiny_engine,
    model: Model | None = None,
    blocks: int = 20,
    seed: int = 3,
) -> int:
    """Beams, groups and samples on pools so small that running beams are preempted; every output against its run alone.

    Returns how often beams were preempted."""
    model = model or tiny_model(tiny_config(vocab_size=11))
    stops = frozenset({EOS})
    rng = random.Random(seed)
    engine = make(model, blocks=blocks, budget=24, seqs=14)
    engine.eos_ids = stops
    if tamper is not None:
        tamper(engine)
    jobs: list[tuple[list[int], BeamSearchParams | SamplingParams, Request]] = []
    for number in range(12):
        prompt = [rng.randrange(4, 11) for _ in range(rng.choice([3, 9, 20]))]
        params = (
            CASES[rng.choice(["plain", "groups", "never"])] if number % 3 else SamplingParams(n=2, max_tokens=20, seed=number)
        )
        if isinstance(params, BeamSearchParams):
            jobs.append((prompt, params, add_beam(engine, prompt, params)))
        else:
            jobs.append((prompt, params, engine.add(prompt, params)))
    for _ in range(600):
        if not engine.busy:
            break
        engine.step()
        engine.check()
    assert not engine.busy, "the engine does not come to an end"
    for prompt, params, request in jobs:
        if isinstance(params, BeamSearchParams):
            found = [seq.output for seq, _ in request.strategy.results(request)]
            same(found, [tokens for tokens, _ in beams(model, prompt, params, stops, make, blocks=400)])
        else:
            alone = make(model, blocks=400)
            alone.eos_ids = stops
            twin = alone.add(prompt, params)
            finish(alone)
            same(tokens_of(request), tokens_of(twin))
    return sum(request.metrics.preemptions for _, params, request in jobs if isinstance(params, BeamSearchParams))


def no_copy_on_write(engine: Engine) -> None:
    engine.blocks._written = lambda seq, start, end: range(0)  # type: ignore[method-assign, assignment]


def fork_after_free(engine: Engine) -> None:
    """The parent's blocks are given up before its children fork from it."""
    commit = engine.scheduler.commit

    def late(request: Request, parent: object, children: list) -> None:
        if len(children) > 1:
            tables = [list(table) for table in parent.kv.tables]  # type: ignore[attr-defined]
            engine.blocks.release(parent)  # type: ignore[arg-type]
            parent.kv.tables = tables  # type: ignore[attr-defined]
        commit(request, parent, children)  # type: ignore[arg-type]

    engine.scheduler.commit = late  # type: ignore[method-assign, assignment]


def unchecked(tamper: Callable[[Engine], None]) -> Callable[[Engine], None]:
    """A broken engine whose books nobody looks at, so that its outputs alone can show it."""

    def broken(engine: Engine) -> None:
        tamper(engine)
        engine.check = lambda: None  # type: ignore[method-assign]

    return broken


def assert_the_books_show(run: Callable[[], object]) -> None:
    """What is broken is found where blocks are counted, before any output is compared."""
    with pytest.raises(AssertionError) as caught:
        run()
    assert not isinstance(caught.value, DifferentError)
    assert caught.traceback[-1].path.name in ("blocks.py", "block_pool.py")
