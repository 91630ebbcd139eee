"""Verification by rejection in the loop gives the target's distribution for any draft distribution."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from headrace.backends.eager.program import EagerProgram
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import ParamError, SamplingParams
from headrace.data.plan import DRAFT, TARGET, KVGroup, Logits
from headrace.drafting import draft_model
from headrace.drafting.base import Drafter
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.lookahead import Jacobi, Lookahead
from headrace.drafting.ngram import PromptLookup
from headrace.drafting.speculation import Speculation
from headrace.engine.admission import AdmissionError
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.ops import rejection
from headrace.ops.processing import RowSpec
from headrace.ops.sampling import process
from headrace.runner.program import Program
from headrace.runner.runner import Runner
from tests.tiny import finish, tiny_config, tiny_model, tokens_of
from tests.tiny_native import native_model, native_program

SIZE = 5
COUNT = {"torch": 300, "native": 1400}  # enough for what is wrong to show in a control
PROMPT = [3, 1, 4, 1]
ALPHA = 1e-4
PARAMS = SamplingParams(temperature=0.9, max_tokens=4, top_p=0.95, repetition_penalty=1.2)


@lru_cache(maxsize=1)
def models() -> tuple[Model, Model]:
    small = tiny_config(vocab_size=SIZE)
    return tiny_model(small), tiny_model(tiny_config(vocab_size=SIZE, num_layers=1), seed=4)


def engine_of(programs: list[Program], drafter: Drafter | None, size: int = SIZE, block: int = 4) -> Engine:
    model = isinstance(drafter, DraftModel)
    return Engine(
        InProcess(Runner(programs[0], programs[1:] if model else ())),
        EngineConfig(
            SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=4096, max_model_len=64), CacheConfig(1024, block)
        ),
        vocab_size=size,
        groups=(TARGET, KVGroup(DRAFT, model=1)) if model else (TARGET,),
        speculation=None if drafter is None else Speculation([drafter], 64, gamma=2),
    )


def torch_programs() -> list[Program]:
    return [EagerProgram(model, KVPool(model.config, 1024, 4, torch.float64)) for model in models()]


@lru_cache(maxsize=1)
def native_models() -> tuple[Model, Model]:
    return native_model(vocab_size=SIZE), native_model(vocab_size=SIZE, num_layers=1)


def native_programs() -> list[Program]:
    return [native_program(model, blocks=1024) for model in native_models()]


RUNNERS = {"torch": torch_programs, "native": native_programs}


def play(drafter: Drafter | None, params: SamplingParams, count: int = COUNT["torch"], backend: str = "torch") -> list[Any]:
    """Many requests that differ in their seeds, all from the same prompt."""
    engine = engine_of(RUNNERS[backend](), drafter, block=4 if backend == "torch" else 16)
    requests = [engine.add(PROMPT, params.replace(seed=seed)) for seed in range(count)]
    finish(engine)
    return requests


@lru_cache(maxsize=2)
def truth(backend: str) -> torch.Tensor:
    """The distribution of the first three tokens [V, V, V], token by token from the model's own processed logits."""
    runner = RUNNERS[backend]()[0]
    engine = engine_of([runner], None, block=4 if backend == "torch" else 16)

    def after(path: list[int]) -> torch.Tensor:
        tokens = [*PROMPT, *path]
        request = engine.add(tokens, SamplingParams(temperature=0.0, max_tokens=1, logprobs=SIZE))
        request.strategy.want = lambda *_: (Logits(),)  # type: ignore[method-assign]
        seen: list[bytes] = []
        request.strategy.select = lambda _, outputs: seen.append(outputs[0][1][0].row) or [[]]  # type: ignore[method-assign]
        while not seen:
            engine.step()
        finish(engine)
        logits = torch.frombuffer(bytearray(seen[0]), dtype=torch.float32)[None]
        spec = RowSpec(PARAMS, [(0, 0)], tokens, len(PROMPT))
        return torch.softmax(process(logits, [spec]).double(), -1)[0]

    return jointly(after)


def jointly(after: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
    """The distribution of three tokens [V, V, V], by those [V] of the token after the ones before it."""
    first, found = after([]), torch.zeros(SIZE, SIZE, SIZE, dtype=torch.float64)
    for a in range(SIZE):
        second = after([a])
        for b in range(SIZE):
            found[a, b] = first[a] * second[b] * after([a, b])
    return found


def chance(requests: list[Any], backend: str = "torch") -> float:
    """The p-value of the first three tokens."""
    return chance_under(truth(backend), requests)


def chance_under(said: torch.Tensor, requests: list[Any]) -> float:
    """The same under a distribution of them [V, V, V]; cells that expect less than 5 are put together."""
    want = said.flatten() * len(requests)
    cells = [(t[0] * SIZE + t[1]) * SIZE + t[2] for (t,) in map(tokens_of, requests)]
    got = torch.bincount(torch.tensor(cells), minlength=SIZE**3).double()
    assert bool((got[want == 0] == 0).all()), "what the filters cut off never comes"
    got, want = got[want > 0], want[want > 0]
    small = want < 5
    if bool(small.any()):
        want = torch.cat([want[~small], want[small].sum()[None]])
        got = torch.cat([got[~small], got[small].sum()[None]])
    return float(chi2.sf(float(((got - want) ** 2 / want).sum()), len(want) - 1))


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "draft": lambda: DraftModel(least=0.0),
    "cut": lambda: DraftModel(least=0.5),  # how long a chain is depends on what was drawn
    "ngram": PromptLookup,
    "jacobi": lambda: Jacobi(2),
}


@pytest.mark.parametrize("backend", RUNNERS)
@pytest.mark.parametrize(("name", "rule"), [("draft", "rejection"), ("cut", "block"), ("ngram", "rejection")])
def test_three_tokens_together_follow_the_target(name: str, rule: str, backend: str) -> None:
    follow(name, rule, COUNT[backend], backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", RUNNERS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_distribution_holds_for_8000_requests(name: str, rule: str, backend: str) -> None:
    follow(name, rule, 8000, backend)


def follow(name: str, rule: str, count: int, backend: str) -> None:
    requests = play(DRAFTERS[name](), PARAMS.replace(verification=rule), count, backend)
    accepted, drafted = (sum(getattr(request.metrics, what) for request in requests) for what in ("accepted", "drafted"))
    assert 0.1 * drafted < accepted < 0.95 * drafted
    assert chance(requests, backend) > ALPHA


def test_plain_decoding_follows_the_distribution() -> None:
    assert chance(play(None, PARAMS)) > ALPHA


# -- negative controls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", RUNNERS)
def test_a_q_that_was_not_drawn_from_would_be_seen(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """q before temperature, filters and penalties: what the draft thinks, not what it was drawn from."""
    append_drawn = draft_model.append_drawn

    def flat(out: Any, chain: Any) -> bool:
        going = append_drawn(out, chain)
        q = torch.frombuffer(bytearray(chain.q[-1]), dtype=torch.float32)
        chain.q[-1] = (0.5 * q + 0.5 / SIZE).numpy().tobytes()
        return going

    monkeypatch.setattr(draft_model, "append_drawn", flat)
    rule = PARAMS.replace(verification="rejection")
    assert chance(play(DraftModel(least=0.0), rule, COUNT[backend], backend), backend) < ALPHA


def test_drawing_from_p_after_a_rejection_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic mistake: what the draft says too often comes too often."""

    def from_p(p: torch.Tensor, q: torch.Tensor, accepted: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        return p.gather(1, accepted[:, None, None].expand(-1, 1, SIZE))[:, 0]

    monkeypatch.setattr(rejection, "_left", from_p)
    assert chance(play(DraftModel(least=0.0), PARAMS.replace(verification="rejection"))) < ALPHA


# -- what it means for a request ---------------------------------------------------------------------------------------------


def test_rejection_draws_a_reproducible_other_sample() -> None:
    """Rule 5 does not hold: a seed says something else than in plain decoding, but always the same."""
    rule = PARAMS.replace(verification="rejection")
    plain, first, again = (
        [tokens_of(request) for request in play(drafter, params, 40)]
        for drafter, params in ((None, PARAMS), (DraftModel(least=0.0), rule), (DraftModel(least=0.0), rule))
    )
    assert first == again
    assert first != plain


def test_greedy_is_the_same_under_every_rule() -> None:
    greedy = PARAMS.replace(temperature=0.0, max_tokens=20)
    plain = [tokens_of(request) for request in play(None, greedy, 1)]
    for rule in ("noise", "rejection", "block"):
        assert [tokens_of(r) for r in play(DraftModel(least=0.0), greedy.replace(verification=rule), 1)] == plain


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_outputs_and_log_probabilities_side_by_side(rule: str) -> None:
    params = PARAMS.replace(verification=rule, n=3, logprobs=2, max_tokens=12, min_tokens=5, stop_token_ids=(2,), seed=7)
    engine = engine_of(torch_programs(), DraftModel(least=0.0))
    request = engine.add(PROMPT, params)
    told: dict[int, list[int]] = {}
    while engine.busy:
        for delta in engine.step():
            assert delta.error is None
            assert [entry.token for entry in delta.logprobs] == delta.token_ids
            told.setdefault(delta.index, []).extend(delta.token_ids)
        engine.check()
    assert tokens_of(request) == [told[i] for i in range(3)]
    assert all(6 <= len(tokens) <= 12 and 2 not in tokens[:5] for tokens in told.values())
    assert request.metrics.accepted > 0


class Less:
    """Makes one token rarer, as `logit_bias` does."""

    scope = "pointwise"

    def __init__(self, by: float) -> None:
        self.by = by

    def apply(self, logits: torch.Tensor, history: object, paths: object) -> torch.Tensor:
        logits[:, 2] -= self.by
        return logits


@pytest.mark.parametrize(("rule", "mode"), [("rejection", "raw"), ("block", "processed")])
def test_with_processors_of_the_callers_the_host_verifies_by_the_same_rule(rule: str, mode: str) -> None:
    """Tokens, what they are said to be likely, and how much of the drafts is taken: as where the logits are."""
    params = PARAMS.replace(verification=rule, logprobs=2, logprobs_mode=mode, stop_token_ids=(4,), min_tokens=2, max_tokens=8)
    for make, by in ((lambda: DraftModel(least=0.0), 0.0), (PromptLookup, 2.0)):  # no processor sees what a model drafts
        told = []
        for more, processors in (({"logit_bias": {2: -by}}, ()), ({}, (Less(by),))):
            engine = engine_of(torch_programs(), make())
            requests = [engine.add(PROMPT, params.replace(seed=seed, **more), processors=processors) for seed in range(12)]
            entries = [[] for _ in requests]
            while engine.busy:
                for delta in engine.step():
                    entries[int(delta.request_id.split("-")[1])] += delta.logprobs
            told.append((requests, entries))
        (there, said_there), (here, said_here) = told
        assert list(map(tokens_of, there)) == list(map(tokens_of, here))
        assert [request.metrics.accepted for request in there] == [request.metrics.accepted for request in here]
        assert sum(request.metrics.accepted for request in here) > 5
        for a, b in zip(said_there, said_here, strict=True):
            assert [(one.token, one.rank, one.top_ids) for one in a] == [(one.token, one.rank, one.top_ids) for one in b]
            assert [one.logprob for one in a] == pytest.approx([one.logprob for one in b], abs=1e-6)


def test_on_the_native_core() -> None:
    """The rule works on rows of logits, from whichever back end; with p = q nearly all is accepted."""
    target = native_model()
    programs = [native_program(model, blocks=64) for model in (target, native_model(norm_eps=3e-2))]
    engine = engine_of(programs, DraftModel(least=0.0), target.config.vocab_size, 16)
    requests = [engine.add(PROMPT, PARAMS.replace(verification="rejection", seed=i, max_tokens=24)) for i in range(8)]
    finish(engine)
    drafted, accepted = (sum(getattr(r.metrics, what) for r in requests) for what in ("drafted", "accepted"))
    assert 0.6 * drafted < accepted < drafted


def test_unsupported_rejection_requests_are_refused() -> None:
    engine = engine_of(torch_programs(), Lookahead())
    with pytest.raises(AdmissionError, match="lookahead drafts trees"):
        engine.add(PROMPT, PARAMS.replace(verification="rejection"))
    engine.add(PROMPT, PARAMS.replace(verification="rejection", temperature=0.0))
    with pytest.raises(ParamError, match="noise, rejection, block"):
        SamplingParams(verification="guess")
    with pytest.raises(ParamError, match="verification"):
        SamplingParams(verification="block", mirostat_tau=3.0)
    with pytest.raises(ParamError, match="verification"):
        SamplingParams(verification="block", penalty_alpha=0.5, top_k=4)
