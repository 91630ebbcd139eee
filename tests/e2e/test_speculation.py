"""Speculation changes no output: worked examples of the rule, and its K/V. With numbers: test_exactness."""

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.eager.program import EagerProgram
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import StepOutput
from headrace.data.types import Draft, Request, Sequence
from headrace.decoding.processors import History
from headrace.decoding.sampling import Sampling
from headrace.drafting.base import Drafter
from headrace.drafting.lookahead import Jacobi, Lookahead
from headrace.drafting.ngram import PromptLookup
from headrace.drafting.policy import Acceptance
from headrace.drafting.speculation import Speculation
from headrace.drafting.suffix import SuffixTree
from headrace.engine.engine import AdmissionError, Engine
from headrace.engine.executor import InProcess
from headrace.kv.pool import KVPool
from headrace.llm import LLM
from headrace.models.base import Model
from headrace.runner.runner import Runner
from headrace.text.tokenizer import frequent_tokens
from tests import tiny_files
from tests.cli_shell import Shell
from tests.e2e.test_exactness import prompts_of
from tests.e2e.test_verification import BACKENDS
from tests.tiny import VOCAB, finish, run_alone, tiny_engine, tiny_model, tokens_of
from tests.tiny_files import write_tiny_gguf

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=32)


def play(model: Model, prompts: list[list[int]], params: SamplingParams, drafter: Drafter | None) -> list[Request]:
    scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=256)
    pool = KVPool(model.config, 256, 16, torch.float64)
    speculation = None if drafter is None else Speculation([drafter], 256, gamma=6)
    engine = Engine(
        InProcess(Runner(EagerProgram(model, pool))),
        EngineConfig(scheduler, CacheConfig(256, 16)),
        vocab_size=model.config.vocab_size,
        speculation=speculation,
    )
    requests = [engine.add(prompt, params.replace(seed=i)) for i, prompt in enumerate(prompts)]
    finish(engine)
    return requests


class Watched(Lookahead):
    """Notes how much of the window came back with answers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def observe(self, *seen: Any) -> None:
        super().observe(*seen)
        _, _, draft, _, nodes = seen
        self.seen.append(len(nodes) == len(draft.memo))


def timed(seconds: float) -> StepOutput:
    """The output of a step that took so long."""
    return StepOutput(0, seconds=seconds)


@pytest.mark.parametrize("free", [True, False])
def test_the_controller_does_not_starve_lookahead(free: bool) -> None:
    """A tree cut short collects nothing. Where rows are free each one is verified whole, and where they are not, none is,
    but for the one that found that out; the text is the same."""
    model, drafter = tiny_model(), Watched()
    engine = tiny_engine(model, budget=128, blocks=128, speculation=Speculation([drafter], 256))
    assert engine.speculation is not None
    took = engine.speculation.record_step
    engine.speculation.record_step = lambda plan, _: took(plan, timed(1.0 if free else plan.num_tokens))  # type: ignore[method-assign]
    request = engine.add([5, 17, 40, 3], GREEDY.replace(max_tokens=150))
    finish(engine)
    assert tokens_of(request)[0] == run_alone(model, [5, 17, 40, 3], GREEDY.replace(max_tokens=150))
    assert all(drafter.seen[:-8]), "near the end of the output windows are narrow"
    assert (len(drafter.seen) > 40) if free else (1 <= len(drafter.seen) <= 2)
    assert request.metrics.steps < 120 if free else request.metrics.steps <= 150


# -- who may draft -----------------------------------------------------------------------------------------------------------


def test_a_draft_must_share_the_targets_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W21: a GPT-like model does not draft for T5. One id that says something else is enough; the same ids are accepted."""
    settings = {"backend": "torch", "device": "cpu", "threads": 1}
    target = write_tiny_gguf(tmp_path / "target.gguf")
    draft = write_tiny_gguf(tmp_path / "draft.gguf", seed=1)
    llm = LLM(target, draft=draft, draft_tokens=3, **settings)  # type: ignore[arg-type]
    (output,) = llm.generate("The mill", GREEDY.replace(max_tokens=8))
    assert output.metrics.drafted > 0
    llm.close()
    names = list(tiny_files._vocabulary()["tokenizer.ggml.tokens"])
    first, second = names.index("a"), names.index("b")
    names[first], names[second] = "b", "a"
    swapped = {**tiny_files._vocabulary(), "tokenizer.ggml.tokens": names}
    monkeypatch.setattr(tiny_files, "_vocabulary", lambda: swapped)
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=1)
    for role in ("draft", "amateur"):
        with pytest.raises(
            ValueError, match=rf"other.gguf cannot be the {role} of .* differ .token {first} is 'b' in one and 'a'"
        ):
            LLM(target, **{role: other}, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("most", [None, 0, 40])
def test_draft_vocab_bounds_the_drafted_tokens(most: int | None, backend: str, tmp_path: Path) -> None:
    """FR-Spec: the first of the vocabulary, those of markup and the ends; what comes out is the same."""
    path = write_tiny_gguf(tmp_path / "model.gguf")
    settings: dict[str, Any] = {"backend": backend, "threads": 1} | ({"dtype": "float64"} if backend == "torch" else {})
    plain = LLM(path, speculate=None, **settings)
    llm = LLM(path, draft=path, speculate="draft", draft_tokens=3, draft_vocab=most, **settings)
    assert llm.engine.speculation is not None
    observe, drafted = llm.engine.speculation.observe, set()

    def observed(request: Request, seq: Sequence, draft: Draft, *answered: Any) -> None:
        drafted.update(draft.tokens)
        observe(request, seq, draft, *answered)

    llm.engine.speculation.observe = observed  # type: ignore[method-assign]
    prompts = ["The mill", "In the end", "a b c"]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24)
    ours, expected = ([one.outputs[0].token_ids for one in each.generate(prompts, params)] for each in (llm, plain))
    assert ours == expected
    allowed = set(frequent_tokens(llm.tokenizer, llm.model_config.vocab_size, most or 10**6))
    assert drafted <= allowed
    assert (drafted - set(frequent_tokens(llm.tokenizer, llm.model_config.vocab_size, 40)) == set()) == (most == 40)
    llm.close()
    plain.close()


def test_a_part_of_the_vocabulary_is_a_drafts(tiny_gguf: Path, shell: Shell) -> None:
    with pytest.raises(ValueError, match="draft_vocab is how many tokens a draft model chooses from"):
        LLM(tiny_gguf, draft_vocab=100)
    with pytest.raises(ValueError, match="0 being all"):
        LLM(tiny_gguf, draft=tiny_gguf, draft_vocab=-1)
    code, _, err = shell("run", tiny_gguf, "hello", "--draft-vocab", 100)
    assert code != 0
    assert "name that model with draft" in err
    command = ["run", tiny_gguf, "hello", "--draft", tiny_gguf, "--draft-vocab", 40, "-m", 4, "--threads", 1]
    assert shell(*command)[0] == 0


# -- what no draft may do ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drafter", [Lookahead, Jacobi])
def test_a_draft_without_permitted_continuation_changes_nothing(backend: str, drafter: Callable[[], Drafter]) -> None:
    """What the window is filled with is no output: after b, which is of the prompt, nothing may be drawn."""
    a, b, c = 3, 40, 17
    params = GREEDY.replace(allowed_token_ids=(a,), bad_words=((b, a),), max_tokens=8)
    engine = BACKENDS[backend]("llama")(speculation=Speculation([drafter()], 256, gamma=7))
    limited = engine.add([b] * 20 + [c], params)
    other = engine.add([5, 17, 40, 3], GREEDY)
    finish(engine)
    assert tokens_of(limited) == [[a] * 8]
    engine = BACKENDS[backend]("llama")()
    alone = engine.add([5, 17, 40, 3], GREEDY)
    finish(engine)
    assert tokens_of(other) == tokens_of(alone)
    assert limited.metrics.drafted > 0


class Careless:
    """Heeds no bounds: a chain, or siblings, beyond what a mask holds."""

    name = "careless"

    def __init__(self, chain: bool) -> None:
        self.chain = chain

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        return Draft([7] * 70, list(range(-1, 69)) if self.chain else [-1] * 70)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drafter", [Lookahead, lambda: Careless(True), lambda: Careless(False)], ids=["look", "deep", "wide"])
def test_a_draft_ends_where_the_model_knows_no_positions(backend: str, drafter: Callable[[], Drafter]) -> None:
    """GPT-2's positions are a table: text and draft together must not pass its end, nor a draft the nodes of a mask."""
    make = BACKENDS[backend]("gpt2", max_position=256)
    rng = random.Random(3)
    prompts = [rng.choices(range(VOCAB), k=length) for length in (225, 238)]
    texts = []
    for speculation in (None, Speculation([drafter()], 256, gamma=7)):
        engine = make(blocks=256, budget=512, speculation=speculation)
        requests = [engine.add(prompt, GREEDY.replace(max_tokens=100)) for prompt in prompts]
        finish(engine)
        texts.append([tokens_of(request) for request in requests])
    assert texts[0] == texts[1]
    assert [len(text[0]) for text in texts[1]] == [256 - 225, 256 - 238]


class Broad(Sampling):
    """A strategy with drafts of its own, of more nodes than a step verifies."""

    def __init__(self, count: int) -> None:
        self.count = count

    def nodes(self, request: Request) -> int:
        return self.count

    def draft(self, request: Request, seq: Sequence) -> Draft | None:
        return None


def test_a_strategy_with_too_many_draft_nodes_is_refused() -> None:
    engine = tiny_engine(tiny_model(), budget=256)
    engine.add([1, 2, 3], GREEDY.replace(max_tokens=3), strategy=Broad(64))
    with pytest.raises(AdmissionError, match="drafts up to 65 nodes and a step verifies 64; let its nodes"):
        engine.add([1, 2, 3], GREEDY, strategy=Broad(65))
    finish(engine)


class InOrder:
    """A processor that must see every token, in order."""

    scope = "stateful"

    def __init__(self) -> None:
        self.seen: list[int] = []

    def apply(self, logits: torch.Tensor, history: History, paths: list[list[int]]) -> torch.Tensor:
        self.seen += [len(history.output) + len(path) for path in paths]
        return logits


def test_a_stateful_processor_gets_no_drafts() -> None:
    model, prompt = tiny_model(), [5, 17, 40, 3]
    engine = tiny_engine(model, speculation=Speculation([Jacobi()], 256, gamma=4))
    processor = InOrder()
    request = engine.add(prompt, GREEDY, processors=(processor,))
    beside = engine.add(prompt, GREEDY)
    finish(engine)
    assert processor.seen == list(range(32))
    assert (request.metrics.drafted, request.metrics.steps) == (0, 32)
    assert beside.metrics.drafted > 0
    assert tokens_of(request) == tokens_of(beside)


class Wrong:
    """Drafts a long chain of a token that does not come."""

    name = "wrong"

    def __init__(self, never: int) -> None:
        self.never = never

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        return Draft([self.never] * most, list(range(-1, most - 1)))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_rejected_draft_leaves_no_block(prefix_caching: bool) -> None:
    """After each step a sequence holds the blocks of its computed tokens, and the pool knows of no others."""
    model, prompt = tiny_model(), [5, 17, 40, 3]
    never = min(set(range(VOCAB)).difference(run_alone(model, prompt, GREEDY)))
    engine = tiny_engine(model, speculation=Speculation([Wrong(never)], 256, gamma=12), prefix_caching=prefix_caching)
    request = engine.add(prompt, GREEDY)
    engine.step()
    while request.seqs:
        (seq,) = request.seqs
        assert len(seq.kv.tables[0]) == -(-seq.kv.computed[0] // 4)
        assert seq.kv.computed[0] == len(seq.tokens) - 1
        engine.step()
    assert request.metrics.drafted > 200
    assert request.metrics.accepted == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_suffixes_are_learned_with_and_without_the_prefix_cache(prefix_caching: bool) -> None:
    """What a tenant's outputs were helps the tenant's next request; another tenant does not see it."""
    engine = tiny_engine(tiny_model(), speculation=Speculation([SuffixTree()], 256, gamma=6), prefix_caching=prefix_caching)
    steps = []
    for tenant in (b"one", b"one", b"two", b"one"):
        request = engine.add([5, 17, 40, 3], SamplingParams(temperature=1.0, seed=4, max_tokens=40), salt=tenant)
        finish(engine)
        steps.append(request.metrics.steps)
    assert steps[1] == steps[3] < steps[0] / 2
    assert steps[2] == steps[0]


def test_finished_requests_leave_no_drafting_state() -> None:
    """However they ended: whole, aborted, failed, or as siblings whose parent is gone."""

    class Fails:
        scope = "path"

        def apply(self, logits: torch.Tensor, history: History, paths: list[list[int]]) -> torch.Tensor:
            if len(history.output) > 6:
                raise ValueError("no more")
            return logits

    speculation = Speculation([PromptLookup(), Lookahead()], 256)
    took = speculation.record_step
    speculation.record_step = lambda plan, _: took(plan, timed(plan.num_tokens))  # type: ignore[method-assign]
    engine = tiny_engine(tiny_model(), blocks=256, speculation=speculation)
    gc.collect()
    before, sizes = sequences_alive(), []
    for _ in range(4):
        for number in range(8):
            params = SamplingParams(temperature=1.0, seed=number, max_tokens=24, n=1 + number % 2)
            more = {"processors": (Fails(),)} if number == 3 else {}
            engine.add([1, 2, 3, 1, 2, 3, number], params, request_id=f"{number}", **more)  # type: ignore[arg-type]
        for step in range(200):
            engine.step()
            if step == 12:
                engine.abort("5")
                engine.abort("6")
        assert not engine.busy
        sizes.append(state_size(speculation) + state_size(speculation.acceptance))
    assert sizes[0] == sizes[-1]
    gc.collect()
    assert sequences_alive() == before


def sequences_alive() -> int:
    return sum(type(one) is Sequence for one in gc.get_objects())


def state_size(what: Speculation | Acceptance) -> int:
    """Entries in all containers of an object."""
    names = vars(what) if hasattr(what, "__dict__") else what.__slots__
    return sum(len(value) for name in names if isinstance(value := getattr(what, name), dict | list | set))


# -- worked examples ---------------------------------------------------------------------------------------------------------


class Says:
    """Drafts what it is told to, once."""

    name = "says"

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        tokens, self.tokens = self.tokens[:most], []
        return Draft(tokens, list(range(-1, len(tokens) - 1))) if tokens else None


def test_a_mismatched_draft_token_is_replaced_by_the_target() -> None:
    """W44, W45: of "in the bus" against the target's "in the car" two tokens are accepted, and the mismatch gives a third.

    The rejected token is the draft's, and everything after it goes; where all match the target adds one of its own.
    """
    model, prompt = tiny_model(), [5, 17, 40, 3]
    engine = tiny_engine(model)
    request = engine.add(prompt, GREEDY.replace(max_tokens=6))
    finish(engine)
    target = tokens_of(request)[0]
    first, in_, the, car = target[:4]
    bus = (car + 1) % VOCAB
    for tail, accepted, steps in (([in_, the, bus, 9], 2, 4), ([in_, the, car, target[4]], 4, 2)):
        engine = tiny_engine(model, speculation=Speculation([Says(tail)], 256, gamma=4))
        request = engine.add(prompt, GREEDY.replace(max_tokens=6))
        deltas = []
        while engine.busy:
            deltas += [delta.token_ids for delta in engine.step()]
        assert deltas[:2] == [[first], [in_, the, car] if accepted == 2 else target[1:6]]
        assert tokens_of(request)[0] == target
        assert (request.metrics.accepted, request.metrics.drafted, request.metrics.steps) == (accepted, 4, steps)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_kv_after_a_rollback_is_that_of_a_fresh_prefill(kept: int) -> None:
    """Whatever was accepted of a draft, the pool then holds what computing the text anew would put there."""
    model, prompt = tiny_model(), [7, 2, 60, 33, 8]
    engine = tiny_engine(model)
    request = engine.add(prompt, GREEDY.replace(max_tokens=8))
    finish(engine)
    target = tokens_of(request)[0]
    # A tree whose true nodes lie behind wrong siblings, so that what is accepted has to move.
    tokens, parents, tip = [], [], -1
    for place in range(3):
        right = target[1 + place] if place < kept else (target[1 + place] + 1) % VOCAB
        tokens += [(target[1 + place] + 2) % VOCAB, right]
        parents += [tip, tip]
        tip = len(tokens) - 1

    class Tree(Says):
        def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
            return Draft(list(tokens), list(parents)) if len(seq.output) == 1 else None

    engine = tiny_engine(model, speculation=Speculation([Tree([])], 256, gamma=6))
    request = engine.add(prompt, GREEDY.replace(max_tokens=8))
    while len(request.seqs[0].output) < kept + 3:
        engine.step()
    assert request.metrics.accepted == kept
    seq = request.seqs[0]
    assert not seq.kv.moves
    ours = kv_of(engine, seq)
    fresh = tiny_engine(model)
    other = fresh.add(seq.tokens, GREEDY.replace(max_tokens=2))
    fresh.step()
    assert torch.allclose(ours, kv_of(fresh, other.seqs[0])[:, :, : seq.kv.computed[0]], atol=1e-12)


def kv_of(engine: Engine, seq: Sequence) -> torch.Tensor:
    """K and V of the computed tokens [layers, 2, tokens, heads, dim], as the tables find them."""
    pool: KVPool = engine.executor.runner.programs[0].pool  # type: ignore[attr-defined]
    return pool.data[:, :, seq.kv.tables[0]].flatten(2, 3)[:, :, : seq.kv.computed[0]].clone()


def test_jacobi_needs_no_more_steps_than_tokens() -> None:
    """W2: verification computes many positions in one pass; the fixpoint is the greedy text, and comes no later."""
    model = tiny_model()
    for start in range(6):
        request = play(model, [[start, 9, 4]], GREEDY, Jacobi(16))[0]
        assert request.metrics.steps <= 32
        assert tokens_of(request) == tokens_of(play(model, [[start, 9, 4]], GREEDY, None)[0])


def test_the_rule_is_not_a_comparison_of_texts() -> None:
    """W20, W43: with noise the target is sampled and the match is followed: the same sample as without a draft, at any
    temperature, which neither greedy comparison nor a rejection rule would give."""
    model = tiny_model()
    for temperature in (0.0, 0.7, 1.5):
        params = SamplingParams(temperature=temperature, max_tokens=20)
        plain = play(model, prompts_of(6, VOCAB), params, None)
        drafted = play(model, prompts_of(6, VOCAB), params, PromptLookup())
        assert [tokens_of(request) for request in drafted] == [tokens_of(request) for request in plain]
