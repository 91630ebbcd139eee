"""Drafts by trained heads change no token, greedy or sampled, on either back end; trained heads save steps."""

import random
from functools import lru_cache
from typing import Any

import msgspec
import pytest
import torch

from headrace.backends.eager import step
from headrace.backends.eager.program import EagerHeads
from headrace.backends.native.heads import NativeHeads
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import DRAFT, FEATURES, TARGET, Feed, KVGroup
from headrace.drafting.base import Drafter
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.heads import TrainedHeads
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.kv.pool import KVPool
from headrace.ops.context import FeedRows, build
from headrace.runner.early_exit import Exit
from headrace.runner.heads import EXIT, FEATURE, HEADS, HeadInputs, Heads, affine, enter, heads_config, predict
from headrace.runner.runner import Runner
from headrace.runner.span import Span
from headrace.training.head_kinds import initial_tensors
from headrace.training.heads import loss_of
from headrace.training.teacher import Batch, FeatureLayer, Teacher, norm, shifted
from headrace.training.texts import Text
from tests.e2e.test_draft_model import GREEDY, Native, Torch, load, watched
from tests.tiny import VOCAB, finish, run_alone, tokens_of
from tests.tiny_native import BLOCK, MAX_LEN, native_alone, native_model, native_program, source_of

COUNT = 3
EXITS = (1,)  # of the two layers that the tiny model has
LONG = GREEDY.replace(max_tokens=40)


@lru_cache
def teacher() -> Teacher:
    """Of the tiny model that both sides run: its matrices are what bfloat16 holds."""
    model: Any = native_model()
    table, last = model.tokens.weight.detach(), model.norm.weight.detach().float()
    return Teacher(model.config, table.bfloat16(), last, table.bfloat16())


@lru_cache
def heads(kind: str, trained: bool, native: bool = False, exits: tuple[int, ...] = EXITS) -> Heads:
    """Random heads, or such that know the texts the tiny model writes after `prompts()`, here or on the native core."""
    random_ = torch.Generator().manual_seed(5)
    exits = exits if kind == EXIT else ()
    count = len(exits) or COUNT
    tensors = {
        name: x + 0.05 * torch.randn(x.shape, generator=random_) for name, x in initial_tensors(kind, teacher(), count).items()
    }
    if trained:
        tensors = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        adam = torch.optim.Adam(tensors.values(), lr=0.01)
        alone = native_alone if native else run_alone
        batch = Batch.of([text_of(prompt, alone(native_model(), prompt, LONG), exits) for prompt in prompts()])
        for _ in range(120):
            adam.zero_grad()
            loss_of(kind, tensors, teacher(), batch, count).backward()  # type: ignore[no-untyped-call]
            adam.step()
    made = {name: x.detach().bfloat16() for name, x in tensors.items()}
    made["vocab"] = torch.arange(VOCAB, dtype=torch.int32)
    return Heads(kind, count, made, exits, exits[0] if exits else 0)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [rng.choices(range(VOCAB), k=length) for length in (4, 9, 13, 20)]


def hidden_rows(tokens: list[int], exits: tuple[int, ...] = ()) -> torch.Tensor:
    """The tiny model's rows [n, hidden] after its last layer, without any engine; before them those after each exit's."""
    model, size = native_model(), 4
    pool = KVPool(model.config, 64, size, torch.float64)
    ctx = build(pool, [FeedRows(tokens, list(range(-(-len(tokens) // size))), 0, [], [])])
    rows = [model.embed(ctx)]
    for layer in range(model.config.num_layers):
        rows.append(model.layer(layer, rows[-1], ctx))
    return torch.cat([rows[last] for last in (*exits, -1)], 1).float()


def text_of(prompt: list[int], answer: list[int], exits: tuple[int, ...]) -> Text:
    return Text(torch.tensor(prompt + answer), len(prompt), hidden_rows(prompt + answer, exits).bfloat16())


@pytest.fixture(scope="module", params=[Torch, Native], ids=["torch", "native"])
def side(request: pytest.FixtureRequest) -> Torch:
    made: Torch = request.param()
    made.target = native_model()
    return made


def engine_of(
    side: Torch, made: Heads, *, blocks: int = 60, gamma: int = COUNT, budget: int = 64, least: float = 0.0, after: int = 0
) -> Engine:
    """`after`: of an exit, how many layers really run."""
    source = source_of(side.target)
    target: Any = side.program(side.target, blocks)
    settings = {"num_blocks": blocks, "block_size": BLOCK, "max_positions": MAX_LEN + 64, "threads": 1}
    native = side.block == BLOCK
    companion = NativeHeads(made, target, source, **settings) if native else EagerHeads(made, target, source)
    scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=budget, max_model_len=256)
    groups = [TARGET, KVGroup(DRAFT, model=1)] if made.kind == FEATURE else [TARGET]
    drafter: Drafter = TrainedHeads(COUNT, least=least) if made.kind == HEADS else DraftModel(FEATURE, keeps=False, least=least)
    if made.span is None:
        runner = Runner(target, [companion])
        runner.reserve(FEATURES)
        groups.append(KVGroup(FEATURES, "hidden"))
    else:
        runner = Runner(target, [Exit(Span(after or made.drafts), companion, made.exit)])
        drafter = DraftModel(EXIT, group=None, least=least)
    return Engine(
        InProcess(runner),
        EngineConfig(scheduler, CacheConfig(blocks, side.block)),
        vocab_size=VOCAB,
        groups=tuple(groups),
        speculation=Speculation([drafter], 256, gamma),
    )


def run(side: Torch, engine: Engine, jobs: list[tuple[list[int], SamplingParams]], exact: bool = True) -> list[Any]:
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    finish(engine)
    same = [
        tokens_of(request) == [side.alone(prompt, params, child) for child in range(params.n)]
        for request, (prompt, params) in zip(requests, jobs, strict=True)
    ]
    assert all(same) is exact
    return requests


@pytest.mark.parametrize("kind", [HEADS, FEATURE])
def test_heads_change_nothing(side: Torch, kind: str) -> None:
    engine = engine_of(side, heads(kind, True))
    for _ in range(2):  # the second time from the prefix cache
        requests = run(side, engine, load(1))
    assert sum(request.metrics.drafted for request in requests) > 20


@pytest.mark.parametrize("kind", [HEADS, FEATURE])
@pytest.mark.parametrize("trained", [False, True], ids=["random", "trained"])
def test_on_tiny_pools_with_preemption(side: Torch, kind: str, trained: bool) -> None:
    jobs = [(prompt, params.replace(max_tokens=30)) for prompt, params in [*load(1), *load(11)]]
    engine = engine_of(side, heads(kind, trained), blocks=12 if side.block == BLOCK else 40, budget=9 if trained else 64)
    run(side, engine, jobs)
    assert engine.scheduler.preemptions > 0
    assert engine.blocks.used == 0


@pytest.mark.parametrize("kind", [HEADS, FEATURE])
def test_training_pays(side: Torch, kind: str) -> None:
    """On texts that heads have learnt, much of what they draft is accepted, and a step yields more than 1.5 tokens."""
    shares = []
    for trained in (False, True):
        engine = engine_of(side, heads(kind, trained, side.block == BLOCK))
        requests = run(side, engine, [(prompt, LONG) for prompt in prompts()])
        shares.append([sum(getattr(one.metrics, name) for one in requests) for name in ("accepted", "drafted", "steps")])
    (guessed, _, _), (accepted, drafted, steps) = shares
    assert guessed < accepted / 3
    assert accepted > 0.3 * drafted
    assert 1.5 * steps < 4 * 40


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=16)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", [HEADS, FEATURE])
def test_an_uncertain_chain_ends(side: Torch, kind: str, params: SamplingParams) -> None:
    """A chain has one token at least, and no more where that is unlikely already."""
    engine = engine_of(side, heads(kind, False), least=1.1)
    (request,) = run(side, engine, [(prompts()[1], params)])
    assert request.metrics.drafted < request.metrics.steps


def reference(made: Heads, context: list[int], chain: list[int]) -> list[int]:
    """What heads draft after a text, by the functions they are trained with; but the head's product is not rounded to bfloat16,
    in which many logits are equal."""
    tensors = {name: x.float() for name, x in made.tensors.items()}
    hidden, t = hidden_rows(context)[None], teacher()
    rows = []
    if made.kind == EXIT:
        texts = [context + chain[:place] for place in range(len(chain))]
        rows = [affine(tensors, 0, hidden_rows(text, made.layers)[-1, : t.config.hidden_size]) for text in texts]
    elif made.kind == HEADS:
        rows = [predict(tensors, head, hidden[0, -2]) for head in range(len(chain))]
    else:
        tokens = torch.tensor([context + chain[:-1]])
        before = torch.nn.functional.pad(hidden, (0, 0, 0, len(chain) - 1))
        layer = FeatureLayer(tensors, heads_config(FEATURE, t.config), tokens.shape[1])
        for place in range(len(chain)):
            before = layer.run(enter(tensors, t.embeddings[tokens], shifted(before)))
            rows.append(before[0, len(context) - 1 + place])
    normed = [norm(row, tensors["norm.weight"], t.config.norm_eps).double() for row in rows]
    return [int((row @ t.head.double().t()).argmax()) for row in normed]


def chains_of(side: Torch, made: Heads, after: int = 0) -> list[tuple[list[int], list[int]]]:
    """Texts and what was drafted after them, across rejections, prefix hits and preemption."""
    chains: list[tuple[list[int], list[int]]] = []
    engine = engine_of(side, made, blocks=24 if side.block != BLOCK else 7, budget=24, after=after)
    engine.speculation.run_models = watched(engine.speculation, chains)  # type: ignore[union-attr, method-assign]
    for _ in range(2):
        run(side, engine, [(prompt, GREEDY.replace(max_tokens=20)) for prompt in prompts()])
    assert engine.scheduler.preemptions > 0
    return chains


@pytest.mark.parametrize("kind", [HEADS, FEATURE, EXIT])
def test_drafts_equal_those_of_the_training_networks(kind: str) -> None:
    """In float64, where nothing but the formulas can differ: every chain is the one that the networks of training give."""
    side, made = Torch(), heads(kind, True)
    side.target = native_model()
    chains = chains_of(side, made)
    assert len(chains) > 40
    assert all(chain == reference(made, context, chain) for context, chain in chains)


@pytest.mark.parametrize("kind", [HEADS, FEATURE])
def test_rows_of_another_position_change_the_drafts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: heads that read the row one place too early draft something else; the output stays as it is."""
    side, made = Torch(), heads(kind, True)
    side.target = native_model()
    before = HeadInputs._before

    def early(self: HeadInputs, live: Any, feed: Feed, count: int, features: Any) -> torch.Tensor:
        return before(self, live, msgspec.structs.replace(feed, start=max(feed.start - 1, 0)), count, features)

    monkeypatch.setattr(HeadInputs, "_before", early)
    assert any(chain != reference(made, context, chain) for context, chain in chains_of(side, made))


def test_an_exit_drafts_natively() -> None:
    """Across rejections and preemption no token changes."""
    side = Native()
    side.target = native_model()
    engine = engine_of(side, heads(EXIT, True, True), blocks=7)
    requests = run(side, engine, [(prompt, LONG) for prompt in prompts()])
    assert engine.scheduler.preemptions > 0
    assert 0 < sum(one.metrics.accepted for one in requests) < sum(one.metrics.drafted for one in requests)


def test_an_exit_after_other_layers_would_be_seen() -> None:
    """Negative control: the head of one place reads the rows of another and drafts something else; the output stays."""
    side, made = Torch(), heads(EXIT, True)
    side.target = native_model()
    assert any(chain != reference(made, context, chain) for context, chain in chains_of(side, made, after=2))


def test_drafts_taken_unseen_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of exactness: a verification that follows a child whatever was drawn."""
    side = Torch()
    side.target = native_model()
    monkeypatch.setattr(step, "child", lambda nodes, parents, at, token: at + 1 if at + 1 < len(nodes) else None)
    run(side, engine_of(side, heads(FEATURE, False)), [(prompts()[0], GREEDY.replace(max_tokens=30))], exact=False)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", [HEADS, FEATURE, EXIT])
def test_greedy_under_the_rejection_rule(side: Torch, kind: str, rule: str) -> None:
    engine = engine_of(side, heads(kind, True))
    run(side, engine, [(prompt, GREEDY.replace(verification=rule)) for prompt in prompts()])


def test_native_heads_have_no_table_of_their_own() -> None:
    """The target's embeddings serve both: only the lm_head's part and the layer are packed."""
    side = Native()
    target: Any = native_program(side.target, blocks=8)
    made = NativeHeads(heads(FEATURE, False), target, source_of(side.target), num_blocks=8, block_size=BLOCK, max_positions=320)
    assert not made.weights._tables
