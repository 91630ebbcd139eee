"""Speculative cascades: each token is drawn from the amateur's row where the rule says so, else from the model's own; by any
drafter, in any batch."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch

from headrace.backends.eager.program import EagerProgram
from headrace.backends.eager.step import EagerStep
from headrace.cli.app import main
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import ParamError, SamplingParams
from headrace.data.plan import AMATEUR, DRAFT, TARGET, KVGroup
from headrace.drafting.base import Drafter
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.ngram import PromptLookup
from headrace.drafting.speculation import Speculation
from headrace.engine.admission import AdmissionError
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.ops import contrast
from headrace.ops.processing import RowSpec
from headrace.ops.sampling import process
from headrace.runner.program import Program
from headrace.runner.runner import Runner
from tests.contrast_engines import engine_of, native_engine_of
from tests.contrast_reference import chosen, forward, speculative_cascade
from tests.drafters import Replaying
from tests.e2e.test_contrastive import outputs, prompts
from tests.e2e.test_rejection import ALPHA, PROMPT, SIZE, chance_under, jointly
from tests.native_reference import bfloat16_attention, reference_of
from tests.tiny import VOCAB, finish, run_alone, tiny_config, tiny_model, tokens_of
from tests.tiny_native import as_bfloat16, native_model, packed

# Bars at which each of the two tiny models writes some of the tokens.
RULES = {"chow": 0.9, "opt": 0.1}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, seed=3)
COUNT = 400
DRAWN = SamplingParams(temperature=0.9, max_tokens=4, top_p=0.95, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def large() -> Model:
    return tiny_model()


@pytest.fixture(scope="module")
def small() -> Model:
    return tiny_model(tiny_config(num_layers=1, hidden_size=16), seed=5)


@pytest.mark.parametrize("budget", [64, 7])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", RULES)
def test_it_equals_the_reference_without_a_cache(
    large: Model, small: Model, rule: str, temperature: float, budget: int
) -> None:
    params = PARAMS.replace(temperature=temperature, defer_rule=rule, defer_at=RULES[rule])
    jobs = [(prompt, params) for prompt in prompts(1, 2, 5, 19)]
    expected = [speculative_cascade(large, small, *job) for job in jobs]
    plain = params.replace(defer_rule=None)
    alone = [[run_alone(model, prompt, plain) for prompt, _ in jobs] for model in (large, small)]
    assert outputs(engine_of(large, small, budget=budget), jobs) == expected
    assert expected not in alone, "both models write"


@pytest.mark.parametrize("rule", RULES)
def test_the_extremes_are_the_models(large: Model, small: Model, rule: str) -> None:
    (prompt,) = prompts(2, 12)
    for heat in (0.0, 0.9):
        plain = PARAMS.replace(temperature=heat)
        for at, model in ((1.0, small), (-1.0, large)):
            job = prompt, plain.replace(defer_rule=rule, defer_at=at)
            assert outputs(engine_of(large, small), [job]) == [run_alone(model, prompt, plain)]


@pytest.mark.parametrize("rule", RULES)
def test_the_native_core_equals_the_reference(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = native_model("llama"), as_bfloat16(tiny_model(tiny_config(num_layers=1), seed=5))
    params = PARAMS.replace(temperature=0.9, defer_rule=rule, defer_at=RULES[rule])
    jobs = [(prompt, params) for prompt in prompts(1, 2, 9, 30)]
    with bfloat16_attention(monkeypatch):
        references = [reference_of(model, packed(model)) for model in (large, small)]
        expected = [speculative_cascade(*references, *job) for job in jobs]  # type: ignore[call-arg]
    found = outputs(native_engine_of(large, small, budget=9), jobs)
    assert found == expected
    ends = [[(prompt, one.replace(defer_at=at)) for prompt, one in jobs] for at in (-1.0, 1.0)]
    alone = [outputs(native_engine_of(large, small), each) for each in ends]
    assert found not in alone
    plain = [(prompt, one.replace(defer_rule=None)) for prompt, one in jobs]
    assert outputs(native_engine_of(large, small), plain) == alone[0]
    assert outputs(native_engine_of(small, small), plain) == alone[1]


# -- with drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 5])
def test_drafts_of_any_length_change_nothing(large: Model, small: Model, backend: str, gamma: int) -> None:
    """One of three requests is plain, and so has other drafts."""
    make: Callable[..., Engine] = engine_of
    if backend == "native":
        make, large, small = native_engine_of, native_model("llama"), as_bfloat16(tiny_model(tiny_config(num_layers=1), seed=5))
    params = PARAMS.replace(temperature=0.7, defer_rule="opt", defer_at=RULES["opt"])
    jobs = [(prompt, one) for prompt, one in zip(prompts(8, 6, 17, 9), (params, params, PARAMS), strict=True)]
    expected = [outputs(make(large, small), [job])[0] for job in jobs]
    answers = {(tuple(prompt), 3, 0): text for (prompt, _), text in zip(jobs, expected, strict=True)}
    engine = make(large, small)
    engine.speculation = Speculation([Replaying(answers, VOCAB)], 256, gamma)
    requests = [engine.add(*job) for job in jobs]
    finish(engine)
    assert [tokens_of(request)[0] for request in requests] == expected
    assert all(request.metrics.accepted > 0 for request in requests)


# -- the distribution ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def models() -> tuple[Model, Model]:
    return tiny_model(tiny_config(vocab_size=SIZE)), tiny_model(tiny_config(vocab_size=SIZE, num_layers=1), seed=4)


def torch_programs() -> list[Program]:
    return [EagerProgram(model, KVPool(model.config, 1024, 4, torch.float64)) for model in models()]


def play(params: SamplingParams, drafter: Drafter | None, gamma: int = 1, count: int = COUNT) -> list[Any]:
    """Many requests that differ in their seeds. The amateur drafts, too; after a draft of one token the third is drawn."""
    target, amateur = torch_programs()
    drafts = isinstance(drafter, DraftModel)
    companions = [torch_programs()[1], amateur] if drafts else [amateur]
    groups = (TARGET, KVGroup(DRAFT, model=1), KVGroup(AMATEUR)) if drafts else (TARGET, KVGroup(AMATEUR))
    engine = Engine(
        InProcess(Runner(target, companions, amateur=len(companions))),
        EngineConfig(SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=4096, max_model_len=64), CacheConfig(1024, 4)),
        vocab_size=SIZE,
        groups=groups,
        speculation=None if drafter is None else Speculation([drafter], 64, gamma=gamma),
    )
    requests = [engine.add(PROMPT, params.replace(seed=seed)) for seed in range(count)]
    finish(engine)
    return requests


@lru_cache(maxsize=4)
def truth(params: SamplingParams) -> torch.Tensor:
    """The distribution of the first three tokens [V, V, V]: the row that the rule names, then the filters."""

    def after(path: list[int]) -> torch.Tensor:
        tokens = [*PROMPT, *path]
        rows = [forward(model, tokens)[0][-1].double() for model in models()]
        spec = RowSpec(params, [(0, 0)], tokens, len(PROMPT))
        return torch.softmax(process(chosen(*rows, params)[None].float(), [spec]).double(), -1)[0]  # type: ignore[call-arg]

    return jointly(after)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "amateur": lambda: DraftModel(least=0.0),
    "ngram": PromptLookup,
}


@pytest.mark.parametrize(
    ("name", "rule", "verification", "gamma"),
    [
        ("none", "opt", "noise", 1),
        ("amateur", "opt", "rejection", 1),
        ("amateur", "chow", "block", 2),
        ("ngram", "chow", "rejection", 1),
    ],
)
def test_three_tokens_together_follow_the_rule(name: str, rule: str, verification: str, gamma: int) -> None:
    params = DRAWN.replace(defer_rule=rule, defer_at=RULES[rule], verification=verification)
    requests = play(params, DRAFTERS[name](), gamma)
    assert chance_under(truth(params.replace(verification="noise")), requests) > ALPHA
    assert name == "none" or sum(request.metrics.drafted for request in requests) > 0


def no_last_row(step: EagerStep, fed: Any, amateur: EagerStep) -> None:
    """The token after a chain is drawn from the model's own row."""
    last = fed.root + len(fed.feed.nodes)
    kept = step.logits[last].clone()
    COMBINE(step, fed, amateur)
    if fed.feed.nodes:
        step.logits[last] = kept


def after_the_filters(rule: str, own: torch.Tensor, amateur: torch.Tensor, a: float, b: float, may: Any) -> torch.Tensor:
    """The rule looks at rows of another temperature."""
    theirs = contrast.cascade(rule, own * 3, amateur * 3, a)
    return torch.where((theirs == amateur * 3).all(-1, keepdim=True), amateur, own)


COMBINE = EagerStep._combine


@pytest.mark.parametrize("broken", ["the last row", "the filters"])
def test_wrong_deferral_rules_fail(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "the last row":
        monkeypatch.setattr(EagerStep, "_combine", no_last_row)
    else:
        monkeypatch.setattr("headrace.backends.eager.step.combine", after_the_filters)
    at = 1.0 if broken == "the last row" else RULES["opt"]  # where the amateur writes all, its drafts are accepted
    params = DRAWN.replace(defer_rule="opt", defer_at=at, verification="rejection", top_p=1.0)
    requests = play(params, DraftModel(least=0.0), count=300)
    assert chance_under(truth(params.replace(verification="noise")), requests) < ALPHA


# -- what is refused -------------------------------------------------------------------------------------------------------


def test_unsupported_deferral_requests_are_refused(large: Model, capsys: pytest.CaptureFixture[str]) -> None:
    pool = KVPool(large.config, 32, 4, torch.float64)
    config = EngineConfig(SchedulerConfig(max_num_batched_tokens=8, max_model_len=64), CacheConfig(32, 4))
    alone = Engine(InProcess(Runner(EagerProgram(large, pool))), config, vocab_size=VOCAB)
    with pytest.raises(AdmissionError, match="defer_rule needs an amateur; open the model with amateur=MODEL"):
        alone.add([1, 2], PARAMS.replace(defer_rule="chow"))
    for change, says in (
        ({"defer_rule": "best"}, "defer_rule must be chow or opt, not 'best'"),
        ({"defer_rule": "opt", "defer_at": 1.5}, "defer_at must be between -1 and 1"),
        ({"defer_rule": "opt", "contrastive_beta": 0.5}, "leave contrastive_beta or defer_rule out"),
        ({"defer_rule": "opt", "prompt_logprobs": 0}, "leave defer_rule or prompt_logprobs out"),
        ({"defer_rule": "opt", "penalty_alpha": 0.5, "top_k": 4}, "leave out defer_rule"),
    ):
        with pytest.raises(ParamError, match=says):
            PARAMS.replace(**change)
    assert main(["run", "no-such-model", "hello", "--defer-rule", "opt"]) == 2
    assert "--defer-rule needs a smaller model of the same vocabulary" in " ".join(capsys.readouterr().err.split())
