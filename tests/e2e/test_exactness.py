"""Speculation is exact: every drafter gives the tokens that no speculation gives, greedy and at temperature 0.8 with seeds.

On stories260K in float64, where no sum is near a tie, and on real weights on the native core, whose rows are bitwise invariant.
In full, with every count printed (see docs/en/understand/exactness.md):
    pytest tests/e2e/test_exactness.py -m slow -s
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.eager.program import EagerHeads, EagerProgram
from headrace.backends.native.heads import NativeHeads
from headrace.backends.recipe import BLOCK_SIZE
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import DRAFT, TARGET, KVGroup
from headrace.data.types import Request
from headrace.drafting import blocks
from headrace.drafting.base import Drafter, TargetFeed
from headrace.drafting.blocks import Blocks
from headrace.drafting.draft_model import Chain, DraftModel
from headrace.drafting.lookahead import Jacobi, Lookahead
from headrace.drafting.ngram import PromptLookup
from headrace.drafting.speculation import Speculation
from headrace.drafting.suffix import SuffixTree
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.kv.pool import KVPool
from headrace.llm import LLM
from headrace.models.base import Model
from headrace.runner.early_exit import Exit
from headrace.runner.heads import EXIT, Heads, Tensors
from headrace.runner.runner import Runner
from headrace.runner.span import ATTENTION, MLP, WHOLE, Span
from headrace.training.head_kinds import KINDS, initial_tensors
from headrace.training.teacher import Teacher, read_teacher
from headrace.training.texts import Text, hidden_rows
from headrace.weights.loader import load_model
from headrace.weights.source import WeightSource
from tests.models.llama2c import read_checkpoint
from tests.models.real import PROMPTS
from tests.places import data_path, default_model, model_file
from tests.tiny import finish, run_alone, tiny_model, tokens_of

LENGTH = 64
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "temperature 0.8": SamplingParams(temperature=0.8, ignore_eos=True),
}
# The models beside the target, in the order in which they are its companions.
DRAFT_MODEL, LAYERS, SKIPS, EXITS, OPEN = 1, 2, 3, 4, 5
UNUSED = 0  # a token that stands for a mask: the models were trained to fill in none, so their guesses are seldom right
WAYS: dict[str, Callable[[], list[Drafter]]] = {
    "ngram": lambda: [PromptLookup()],
    "suffix": lambda: [SuffixTree()],
    "lookahead": lambda: [Lookahead()],
    "jacobi": lambda: [Jacobi()],
    "draft": lambda: [DraftModel(model=DRAFT_MODEL, least=0.0)],
    "self, layers": lambda: [DraftModel("self", model=LAYERS, group=None, least=0.0)],
    "self, skips": lambda: [DraftModel("self", model=SKIPS, group=None, least=0.0)],
    "exit": lambda: [DraftModel("exit", model=EXITS, group=None, least=0.0)],
    "blocks": lambda: [Blocks(UNUSED, passes=2, model=OPEN, least=0.0)],
}
# How much is verified, the controller decides.
AUTO: dict[str, Callable[[], list[Drafter]]] = {"auto": lambda: [PromptLookup(), DraftModel(model=DRAFT_MODEL)]}
# With heads as the companion.
HEADS = Path(__file__).resolve().parents[2] / "examples" / "heads"
HEADS_WAYS: dict[str, Callable[[], list[Drafter]]] = {
    "heads": lambda: [DraftModel("feature", keeps=False, least=0.0)],
    "auto": lambda: [PromptLookup(), DraftModel("feature", keeps=False)],
}


@dataclass
class Told:
    """What one way of drafting did, for the record."""

    way: str
    setting: str
    tokens: int
    drafted: int
    accepted: int
    steps: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"  {self.way}, {self.setting}: {self.tokens} tokens equal; drafted {self.drafted}, accepted {self.accepted}, "
            f"{self.tokens / self.steps:.2f} tokens a step, {self.seconds:.0f} s"
        )


Play = Callable[[SamplingParams, list[Drafter] | None, int | None], tuple[list[list[int]], list[Any]]]


def check(play: Play, ways: dict[str, Callable[[], list[Drafter]]], length: int, perfect: tuple[str, ...] = ()) -> None:
    """Every way under every setting against no speculation; each way's drafts are sometimes right and, but for the perfect
    ones, sometimes wrong."""
    told: list[Told] = []
    for setting, params in SETTINGS.items():
        params = params.replace(max_tokens=length)
        plain, _ = play(params, None, None)
        for way, make in ways.items():
            began = time.monotonic()
            tokens, metrics = play(params, make(), None if way in AUTO else 6)
            assert tokens == plain, f"{way}, {setting}: prompts {[i for i, one in enumerate(tokens) if one != plain[i]]}"
            sums = (sum(getattr(each, name) for each in metrics) for name in ("drafted", "accepted", "steps"))
            told.append(Told(way, setting, sum(map(len, tokens)), *sums, time.monotonic() - began))  # type: ignore[call-arg]
            print(told[-1], flush=True)
    for way in ways.keys() - AUTO.keys():
        drafted, accepted = (sum(getattr(one, name) for one in told if one.way == way) for name in ("drafted", "accepted"))
        assert 0 < accepted <= drafted, way
        assert accepted < drafted or way in perfect, way


# -- torch in float64 ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def stories() -> Model:
    return load_model(stored_stories(), torch.float64)


@lru_cache(maxsize=1)
def stored_stories() -> WeightSource:
    return read_checkpoint(data_path("stories260K") / "stories260K.bin")


@lru_cache(maxsize=4)
def changed(model: Model, strength: float) -> Model:
    """A model of the same vocabulary whose weights are these with noise: a draft that often thinks alike."""
    twin = tiny_model(model.config)
    noise = torch.Generator().manual_seed(9)
    for mine, its in zip(twin.parameters(), model.parameters(), strict=True):
        mine.copy_(its * (1 + strength * torch.randn(its.shape, generator=noise, dtype=its.dtype)))
    return twin


@lru_cache(maxsize=1)
def exits() -> Heads:
    """Exits after one layer of stories260K and after three: fitted to the rows of its own texts, not trained."""
    model, layers = stories(), (1, 3)
    runner = Runner(EagerProgram(model, KVPool(model.config, 16, BLOCK_SIZE, torch.float64)))
    texts = []
    for prompt in prompts_of(24, model.config.vocab_size):
        tokens = prompt + run_alone(model, prompt, SamplingParams(temperature=0.8, seed=len(prompt), max_tokens=40))
        texts.append(Text(torch.tensor(tokens), len(prompt), hidden_rows(runner, tokens, layers)))
    norm, table = model.norm.weight.float(), model.tokens.weight.bfloat16()  # type: ignore[attr-defined]
    teacher = Teacher(model.config, table, norm, table)
    tensors = initial_tensors(EXIT, teacher, len(layers))
    KINDS[EXIT].fit(tensors, teacher, texts)
    return Heads(EXIT, len(layers), with_vocab(tensors, model.config.vocab_size), layers, layers[1])


def with_vocab(tensors: Tensors, vocab: int) -> Tensors:
    """As they are kept, and choosing among all tokens."""
    made = {name: x.bfloat16() for name, x in tensors.items()}
    return made | {"vocab": torch.arange(vocab, dtype=torch.int32)}


def prompts_of(count: int, vocab: int) -> list[list[int]]:
    """Beginnings of all lengths; half of them repeat themselves."""
    generator = torch.Generator().manual_seed(count)
    made = []
    for number in range(count):
        length = 1 + number % 23
        part = torch.randint(3, vocab, (length,), generator=generator).tolist()
        made.append([1, *part, *(part if number % 2 else [])])
    return made


def in_torch(
    model: Model, prompts: list[list[int]], draft: Model | None = None, batch: int = 128, exit: int | None = None
) -> Play:
    """Runs of the engine on torch in float64; the companions are a draft model, early layers, skipped sublayers and an exit
    with its head, or with that of number `exit`."""
    layers, most = model.config.num_layers, max(map(len, prompts))

    def play(params: SamplingParams, drafters: list[Drafter] | None, gamma: int | None) -> tuple[list[list[int]], list[Any]]:
        length = most + (params.max_tokens or 0)
        size = batch * -(-(length + 64) // 16)

        def program(of: Model) -> EagerProgram:
            return EagerProgram(of, KVPool(of.config, size, 16, torch.float64))

        target = program(model)
        parts = Span(layers=layers - 1), Span(skips=(*[0] * (layers - 1), ATTENTION | MLP)[::-1])
        head = EagerHeads(exits(), target, stored_stories())
        heads = Exit(Span(exits().drafts), head, exits().exit if exit is None else exit)
        companions = [program(draft or changed(model, 0.1)), *parts, heads, WHOLE]
        engine = Engine(
            InProcess(Runner(target, companions)),
            EngineConfig(SchedulerConfig(batch, 2048, length + 1), CacheConfig(size, 16)),
            vocab_size=model.config.vocab_size,
            groups=(TARGET, KVGroup(DRAFT, model=DRAFT_MODEL)),
            speculation=None if drafters is None else Speculation(drafters, length + 1, gamma),
        )
        requests: list[Request] = [engine.add(prompt, params.replace(seed=i)) for i, prompt in enumerate(prompts)]
        finish(engine)
        return [tokens_of(request)[0] for request in requests], [request.metrics for request in requests]

    return play


@pytest.mark.parametrize(
    ("count", "length"),
    [pytest.param(8, 24, id="8 x 24"), pytest.param(1000, LENGTH, id="1000 x 64", marks=pytest.mark.slow)],
)
def test_every_drafter_on_stories(count: int, length: int) -> None:
    model = stories()
    check(in_torch(model, prompts_of(count, model.config.vocab_size)), WAYS, length)


@pytest.mark.parametrize(
    ("count", "length"),
    [pytest.param(12, 16, id="12 x 16"), pytest.param(1000, LENGTH, id="1000 x 64", marks=pytest.mark.slow)],
)
def test_a_random_model_drafts_for_stories(count: int, length: int) -> None:
    """It is all but always wrong, so that every step rolls back."""
    model = stories()
    draft = tiny_model(model.config, seed=8)
    ways = {"draft": WAYS["draft"]}
    check(in_torch(model, prompts_of(count, model.config.vocab_size), draft), ways, length)


@pytest.mark.parametrize("way", ["draft", "blocks"])
def test_a_wrong_walk_changes_the_text(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Negative control: a node is followed whose token was not drawn, and its K and V stay."""

    def first(tokens: list[int], parents: list[int], node: int, token: int) -> int | None:
        return next((at for at in range(node + 1, len(tokens)) if parents[at] == node), None)

    model = stories()
    play = in_torch(model, prompts_of(4, model.config.vocab_size))
    monkeypatch.setattr("headrace.backends.eager.step.child", first)
    with pytest.raises(AssertionError, match=f"{way}, greedy: prompts"):
        check(play, {way: WAYS[way]}, 16)


def test_a_block_that_is_verified_open_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: in its verification, too, every token of a block sees the whole block, so that what is accepted has K
    and V that decoding token by token would not have."""
    set_chain = blocks.set_chain

    def left_open(target: TargetFeed, chain: Chain) -> None:
        set_chain(target, chain)
        target.feed.full = bool(target.feed.nodes)

    model = stories()
    play = in_torch(model, prompts_of(4, model.config.vocab_size))
    monkeypatch.setattr(blocks, "set_chain", left_open)
    with pytest.raises(AssertionError, match="blocks, greedy: prompts"):
        check(play, {"blocks": WAYS["blocks"]}, 16)


def test_the_head_of_another_exit_lowers_acceptance() -> None:
    """Negative control: what the head of the exit after one layer makes of the rows after three is accepted far less often, and
    changes no token all the same."""
    model = stories()
    accepted = []
    for exit in (None, 0):
        play = in_torch(model, prompts_of(8, model.config.vocab_size), exit=exit)
        params = SETTINGS["greedy"].replace(max_tokens=24)
        tokens, metrics = play(params, WAYS["exit"](), 3)
        assert tokens == play(params, None, None)[0]
        accepted.append(sum(each.accepted for each in metrics) / sum(each.drafted for each in metrics))
    right, wrong = accepted
    assert wrong < right / 2


# -- real weights on the native core ---------------------------------------------------------------------------------------

TASKS = ("{}", "{0}\n{0}", "Write the same twice.\n\n{}", "Q: What comes next?\n\n{0}\n\nA: {0}", "1. {}\n2. ")
TEXTS = [task.format(text) for task in TASKS for text in PROMPTS]


def natively(llm: LLM, parts: tuple[Span, Span], texts: list[str], after: int = 0) -> Play:
    """Runs of an LLM that was opened with a draft model, with parts of the target as further companions: two spans, and an exit
    after so many layers that takes their rows as they are."""
    executor: Any = llm.engine.executor
    target, draft = executor.runner.programs
    companions = [draft, *parts]
    if after:
        teacher = read_teacher(llm.opened, torch.arange(16))
        tensors = with_vocab(initial_tensors(EXIT, teacher, 1), llm.model_config.vocab_size)
        sizes = {"num_blocks": llm.memory_plan.num_blocks, "block_size": BLOCK_SIZE, "max_positions": 1024, "threads": 1}
        head = NativeHeads(Heads(EXIT, 1, tensors, (after,), after), target, llm.opened.source, **sizes)
        companions += [Exit(Span(after), head), WHOLE]
    executor.runner = Runner(target, companions)
    return play_llm(llm, texts)


def play_llm(llm: LLM, texts: list[str]) -> Play:
    """Runs of an LLM with the companions that it has."""

    def play(params: SamplingParams, drafters: list[Drafter] | None, gamma: int | None) -> tuple[list[list[int]], list[Any]]:
        limit = llm.memory_plan.max_model_len
        llm.engine.speculation = None if drafters is None else Speculation(drafters, limit, gamma)
        outputs = llm.generate(texts, [params.replace(seed=i) for i in range(len(texts))])
        return [output.outputs[0].token_ids for output in outputs], [output.metrics for output in outputs]

    return play


def open_pair(target: Path, draft: Path, batch: int) -> LLM:
    llm = LLM(target, draft=draft, backend="native", max_model_len=512, max_num_seqs=batch, threads=1)
    assert llm.backend == "native"
    return llm


@pytest.mark.weights
@pytest.mark.parametrize(
    ("count", "length"), [pytest.param(2, 20, id="2 x 20"), pytest.param(100, LENGTH, id="100 x 64", marks=pytest.mark.slow)]
)
def test_every_drafter_on_smollm2(count: int, length: int) -> None:
    """Rows are bitwise invariant there, so no exception is allowed. Its draft model is itself, which is always right."""
    llm = open_pair(default_model(), default_model(), 16)
    parts = Span(layers=24), Span(skips=(0,) * 20 + (ATTENTION, 0) * 4)
    check(natively(llm, parts, TEXTS[-count:], after=27), WAYS | AUTO, length, perfect=("draft",))
    llm.close()


@pytest.mark.weights
@pytest.mark.parametrize(
    ("count", "length"), [pytest.param(2, 20, id="2 x 20"), pytest.param(100, LENGTH, id="100 x 64", marks=pytest.mark.slow)]
)
def test_the_heads_in_examples(count: int, length: int) -> None:
    llm = LLM(default_model(), draft=HEADS, backend="native", max_model_len=512, max_num_seqs=16, threads=1)
    check(play_llm(llm, TEXTS[-count:]), HEADS_WAYS, length)
    llm.close()


@pytest.mark.weights
@pytest.mark.slow
def test_every_drafter_on_the_qwen_pair() -> None:
    target, draft = (model_file(f"Qwen2.5-Coder-{size}-Instruct.Q4_K_M.gguf") for size in ("1.5B", "0.5B"))
    llm = open_pair(target, draft, 8)
    parts = Span(layers=24), Span(skips=(0,) * 12 + (ATTENTION, 0) * 4)
    ways = {way: WAYS[way] for way in ("ngram", "suffix", "draft", "self, layers")}
    check(natively(llm, parts, TEXTS[:20]), ways | AUTO, LENGTH)
    llm.close()
