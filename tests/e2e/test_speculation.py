"""Speculation leaves every output as it is: the rule by worked examples, and what it does to KV. In numbers: test_exactness."""

from pathlib import Path

import pytest
import torch

from headrace.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.drafting.base import Drafter
from headrace.drafting.lookahead import Jacobi, Lookahead
from headrace.drafting.ngram import PromptLookup
from headrace.drafting.speculation import Speculation
from headrace.engine import Engine
from headrace.kv.pool import KVPool
from headrace.llm import LLM
from headrace.models.base import Model
from headrace.params import SamplingParams
from headrace.runner.executor import InProcess
from headrace.runner.runner import TorchRunner
from headrace.text.frequent import frequent_tokens
from headrace.types import Draft, FeedOutput, Request, Sequence
from tests import tiny_files
from tests.cli_shell import Shell
from tests.e2e.test_exactness import prompts_of
from tests.tiny import VOCAB, finish, run_alone, tiny_engine, tiny_model, tokens_of
from tests.tiny_files import write_tiny_gguf

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=32)


def play(model: Model, prompts: list[list[int]], params: SamplingParams, drafter: Drafter | None) -> list[Request]:
    scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=256)
    pool = KVPool(model.config, 256, 16, torch.float64)
    speculation = None if drafter is None else Speculation([drafter], 256, gamma=6)
    engine = Engine(
        InProcess(TorchRunner(model, pool)),
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

    def observe(self, request: Request, seq: Sequence, draft: Draft, out: FeedOutput) -> None:
        super().observe(request, seq, draft, out)
        self.seen.append(len(out.nodes) == len(draft.memo))


@pytest.mark.parametrize("free", [True, False])
def test_the_controller_does_not_starve_lookahead(free: bool) -> None:
    """A tree cut short collects nothing. Where rows are free each one is verified whole, and where they are not, none is,
    but for the one that found that out; the text is the same."""
    model, drafter = tiny_model(), Watched()
    engine = tiny_engine(model, budget=128, blocks=128, speculation=Speculation([drafter], 256))
    assert engine.speculation is not None
    took = engine.speculation.took
    engine.speculation.took = lambda plan, _: took(plan, 1.0 if free else plan.num_tokens)  # type: ignore[method-assign]
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
    vocabulary = tiny_files._vocabulary()
    names = vocabulary["tokenizer.ggml.tokens"]
    first, second = names.index("a"), names.index("b")
    names[first], names[second] = "b", "a"
    monkeypatch.setattr(tiny_files, "_vocabulary", lambda: vocabulary)
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=1)
    for role in ("draft", "amateur"):
        with pytest.raises(
            ValueError, match=rf"other.gguf cannot be the {role} of .* differ .token {first} is 'b' in one and 'a'"
        ):
            LLM(target, **{role: other}, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [None, 0, 40])
def test_a_draft_chooses_among_as_many_tokens_as_it_is_told(most: int | None, tmp_path: Path) -> None:
    """FR-Spec: the first of the vocabulary, those of markup and the ends; what comes out is the same."""
    path = write_tiny_gguf(tmp_path / "model.gguf")
    plain = LLM(path, backend="native", threads=1, speculate=None)
    llm = LLM(path, draft=path, speculate="draft", draft_tokens=3, draft_vocab=most, backend="native", threads=1)
    assert llm.engine.speculation is not None
    observe, drafted = llm.engine.speculation.observe, set()

    def heard(request: Request, seq: Sequence, draft: Draft, out: FeedOutput) -> None:
        drafted.update(draft.tokens)
        observe(request, seq, draft, out)

    llm.engine.speculation.observe = heard  # type: ignore[method-assign]
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
    with pytest.raises(ValueError, match="draft_vocab needs the native back end"):
        LLM(tiny_gguf, draft=tiny_gguf, draft_vocab=100, backend="torch")
    code, _, err = shell("run", tiny_gguf, "hello", "--draft-vocab", 100)
    assert code != 0
    assert "name that model with draft" in err
    command = ["run", tiny_gguf, "hello", "--draft", tiny_gguf, "--draft-vocab", 40, "-m", 4, "--threads", 1]
    assert shell(*command)[0] == 0


# -- worked examples ---------------------------------------------------------------------------------------------------------


class Says:
    """Drafts what it is told to, once."""

    name = "says"

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        tokens, self.tokens = self.tokens[:most], []
        return Draft(tokens, list(range(-1, len(tokens) - 1))) if tokens else None


def test_the_drafts_bus_is_rejected_and_the_targets_car_is_kept() -> None:
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
    assert not seq.moves
    ours = kv_of(engine, seq)
    fresh = tiny_engine(model)
    other = fresh.add(seq.tokens, GREEDY.replace(max_tokens=2))
    fresh.step()
    assert torch.allclose(ours, kv_of(fresh, other.seqs[0])[:, :, : seq.computed[0]], atol=1e-12)


def kv_of(engine: Engine, seq: Sequence) -> torch.Tensor:
    """K and V of the computed tokens [layers, 2, tokens, heads, dim], as the tables find them."""
    pool: KVPool = engine.executor.runner.pool  # type: ignore[attr-defined]
    return pool.data[:, :, seq.tables[0]].flatten(2, 3)[:, :, : seq.computed[0]].clone()


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
