"""Drafts by a model or by a part of the target change no token, greedy or sampled, and save steps."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.backends.eager.program import EagerProgram
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import DRAFT, TARGET, KVGroup
from headrace.data.types import ALL
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.runner.program import Program
from headrace.runner.runner import Runner
from headrace.runner.span import ATTENTION, MLP, Span
from tests.tiny import VOCAB, finish, run_alone, tiny_config, tiny_model, tokens_of
from tests.tiny_native import native_alone, native_model, native_program

COMPANION, PART = DraftModel(least=0.0), DraftModel("self", group=None, least=0.0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
SETTINGS = (
    GREEDY,
    SamplingParams(temperature=0.8, seed=3, max_tokens=16),
    SamplingParams(temperature=0.8, seed=4, max_tokens=16, repetition_penalty=1.3, frequency_penalty=0.3, no_repeat_ngram=2),
    SamplingParams(temperature=0.8, seed=5, max_tokens=16, n=3, top_p=0.9),
)


def near(model: Model, strength: float = 0.05) -> Model:
    """A draft that mostly thinks like the model: its weights, a little changed."""
    twin = tiny_model(model.config, next(model.parameters()).dtype)
    noise = torch.Generator().manual_seed(9)
    for mine, its in zip(twin.parameters(), model.parameters(), strict=True):
        mine.copy_(its * (1 + strength * torch.randn(its.shape, generator=noise, dtype=torch.float64).to(its.dtype)))
    return twin


class Torch:
    block = 4

    def __init__(self) -> None:
        self.target = tiny_model()
        self.drafts = {"near": near(self.target), "other": tiny_model(tiny_config(num_layers=1), seed=8)}
        self.known: dict[Any, list[int]] = {}

    def program(self, model: Model, blocks: int) -> Program:
        return EagerProgram(model, KVPool(model.config, blocks, self.block, torch.float64))

    def alone(self, prompt: list[int], params: SamplingParams, child: int) -> list[int]:
        """The tokens of a child in an engine of its own, computed once."""
        key = (self.target, tuple(prompt), repr(params), child)
        if key not in self.known:
            self.known[key] = self._alone(prompt, params, child)
        return self.known[key]

    def _alone(self, prompt: list[int], params: SamplingParams, child: int) -> list[int]:
        return run_alone(self.target, prompt, params, child)


class Native(Torch):
    block = 16

    def __init__(self) -> None:
        self.target = native_model()
        self.drafts = {"near": native_model(norm_eps=3e-2), "other": native_model(num_layers=1)}
        self.known = {}

    def program(self, model: Model, blocks: int) -> Program:
        return native_program(model, blocks=blocks)

    def _alone(self, prompt: list[int], params: SamplingParams, child: int) -> list[int]:
        return native_alone(self.target, prompt, params, child)


@pytest.fixture(scope="module", params=[Torch, Native], ids=["torch", "native"])
def side(request: pytest.FixtureRequest) -> Torch:
    made: Torch = request.param()
    return made


def engine_of(side: Torch, draft: str | Span, *, blocks: int = 60, gamma: int = 4, budget: int = 64) -> Engine:
    target = side.program(side.target, blocks)
    part = isinstance(draft, Span)
    companion = draft if isinstance(draft, Span) else side.program(side.drafts[draft], blocks)
    scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=budget, max_model_len=256)
    return Engine(
        InProcess(Runner(target, [companion])),
        EngineConfig(scheduler, CacheConfig(blocks, side.block)),
        vocab_size=VOCAB,
        groups=(TARGET,) if part else (TARGET, KVGroup(DRAFT, model=1)),
        speculation=speculation(PART if part else COMPANION, gamma),
    )


def speculation(drafter: DraftModel, gamma: int) -> Speculation:
    return Speculation([drafter], 256, gamma)


def load(seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    shared = rng.choices(range(VOCAB), k=20)
    prompts = [(shared if i % 2 else []) + rng.choices(range(VOCAB), k=length) for i, length in enumerate((1, 5, 18, 33))]
    return list(zip(prompts, SETTINGS, strict=True))


def run(side: Torch, engine: Engine, jobs: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    finish(engine)
    for request, (prompt, params) in zip(requests, jobs, strict=True):
        assert tokens_of(request) == [side.alone(prompt, params, child) for child in range(params.n)]
    return requests


DRAFTS = ("near", "other", Span(layers=1), Span(skips=(0, ATTENTION | MLP)))


@pytest.mark.parametrize("draft", DRAFTS, ids=["near", "other", "layers", "skips"])
def test_drafts_change_nothing(side: Torch, draft: str | Span) -> None:
    engine = engine_of(side, draft)
    for _ in range(2):  # the second time from the prefix cache
        requests = run(side, engine, load(1))
    assert sum(request.metrics.drafted for request in requests) > 20
    assert any(0 < request.metrics.accepted < request.metrics.drafted for request in requests)


@pytest.mark.parametrize("seed", range(3))
def test_on_tiny_pools_with_preemption(side: Torch, seed: int) -> None:
    jobs = [(prompt, params.replace(max_tokens=30)) for prompt, params in [*load(seed), *load(seed + 10)]]
    engine = engine_of(side, DRAFTS[seed], blocks=12 if side.block == 16 else 40, budget=[64, 9, 21][seed], gamma=3 + seed)
    run(side, engine, jobs)
    assert engine.scheduler.preemptions > 0
    assert engine.blocks.used == 0


def test_a_good_draft_saves_steps(side: Torch) -> None:
    """All layers as a part: everything is accepted, and four drafted tokens take a fifth of the steps."""
    (request,) = run(side, engine_of(side, Span(layers=2)), [(load(2)[2][0], GREEDY.replace(max_tokens=41))])
    assert request.metrics.accepted == request.metrics.drafted
    assert request.metrics.steps == 1 + 8
    (request,) = run(side, engine_of(side, Span(layers=2)), [(load(2)[2][0], SETTINGS[1].replace(max_tokens=41))])
    assert request.metrics.steps == 1 + 8


def test_the_draft_model_catches_up_and_reads_its_own_kv(side: Torch) -> None:
    """After rejections and prefix hits the draft's chains are those that the draft model alone would draw."""
    engine = engine_of(side, "other", gamma=3)
    chains: list[tuple[list[int], list[int]]] = []
    engine.speculation.run_models = watched(engine.speculation, chains)  # type: ignore[union-attr, method-assign]
    for prompt, _ in [load(3)[1], load(3)[3], load(3)[1]]:
        run(side, engine, [(prompt, GREEDY)])
    draft = side.drafts["other"]
    alone = native_alone if side.block == 16 else run_alone
    assert len(chains) > 15
    for context, chain in chains:
        assert chain == alone(draft, context, GREEDY.replace(max_tokens=len(chain), ignore_eos=True))


def watched(speculation: Any, chains: list[tuple[list[int], list[int]]]) -> Callable[..., Any]:
    fill = speculation.run_models

    def watching(works: list[Any], run: Any, filled: Any) -> Any:
        failed = fill(works, run, filled)
        chains.extend(
            (list(work.seq.tokens), list(work.seq.decode.draft.tokens)) for work in works if work.seq.decode.draft is not None
        )
        return failed

    return watching


def stale_hits(engine: Engine) -> None:
    """A hit counts for the draft's group as well, whoever filled the block."""
    match = engine.blocks.match

    def matching(seq: Any, need: int | None = None, most: int = ALL) -> int:
        saved = match(seq, need, most)
        seq.kv.computed = [seq.kv.computed[0]] * len(seq.kv.computed)
        return saved

    engine.blocks.match = matching  # type: ignore[method-assign]


def test_a_hit_without_the_drafts_keys_would_be_seen(side: Torch) -> None:
    """Negative control: the target filled the block, the draft did not. The output stays right, the chains do not."""
    jobs = [(load(3)[3][0], GREEDY.replace(max_tokens=2)), (load(3)[3][0], GREEDY)]
    chains: dict[bool, list[tuple[list[int], list[int]]]] = {False: [], True: []}
    for broken in (False, True):
        engine = engine_of(side, "near", gamma=3)
        if broken:
            stale_hits(engine)
        engine.speculation.run_models = watched(engine.speculation, chains[broken])  # type: ignore[union-attr, method-assign]
        for job in jobs:
            engine.blocks.begin()
            engine.blocks.end()
            run(side, engine, [job])
    assert chains[False][:1] != chains[True][:1] or chains[False] != chains[True]


@pytest.mark.parametrize(("often", "least", "most"), [(9, 20, 10**6), (1, 1, 12)])
def test_a_draft_that_fails_costs_no_answer(side: Torch, often: int, least: int, most: int) -> None:
    """One that fails now and then is asked again; one that always does is given up, for each request after three times."""
    engine = engine_of(side, "near")
    companion = engine.executor.runner.programs[1]  # type: ignore[attr-defined]
    run_it, calls = companion.run, [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] % often == 0:
            raise RuntimeError("out of luck")
        return run_it(*args, **kwargs)

    companion.run = failing
    speculation: Any = engine.speculation
    observe, verified = speculation.observe, [0, 0]

    def observing(request: Any, seq: Any, draft: Any, *answered) -> None:
        verified[0] += 1
        verified[1] += len(draft.tokens)
        observe(request, seq, draft, *answered)

    speculation.observe = observing
    requests = run(side, engine, load(4))
    assert least <= calls[0] <= most
    assert not speculation._failures
    assert [sum(getattr(one.metrics, name) for one in requests) for name in ("drafts", "drafted")] == verified
