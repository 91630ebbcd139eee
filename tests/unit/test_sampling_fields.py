"""No field of a request is dropped in silence: a strategy says which it heeds, and admission refuses what it would drop."""

import re
from typing import Any

import pytest

from benchmarks.fake_model import VOCAB, Deferred, FakeRunner
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import BeamSearchParams, RefineParams, SamplingParams, TimestampParams
from headrace.data.plan import AnyWant, Drawn, Feed, Sample
from headrace.data.types import Child, Request, Sequence
from headrace.decoding.base import COMMON, DRAWN, Outputs, Strategy
from headrace.decoding.beam import BeamSearch
from headrace.decoding.contrastive import ContrastiveSearch
from headrace.decoding.processors import LengthNudge
from headrace.decoding.prompts import Scoring
from headrace.decoding.refine import Refine
from headrace.decoding.sampling import BestOf, Sampling
from headrace.engine.admission import AdmissionError
from headrace.engine.engine import Engine


class Plain(Strategy):
    """A user's own: it inherits, and says what it must."""

    streams = True

    def width(self, request: Request) -> int:
        return 1

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        return (Sample(seq.decode.index),) if last else ()

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        return [[Child(token=answer.tokens[0])] for _, (answer,) in outputs if isinstance(answer, Drawn)]

    def done(self, request: Request) -> bool:
        return False


class Drawing(Plain):
    honours = DRAWN


# Of every field a value that means something. What another field must allow stands beside it.
SET: dict[str, Any] = {
    "n": 2, "best_of": 2, "temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5, "top_n_sigma": 1.0,
    "xtc_probability": 0.5, "mirostat_tau": 3.0, "repetition_penalty": 1.1, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "no_repeat_ngram": 2, "dry_multiplier": 1.0, "contrastive_beta": 0.5, "defer_rule": "chow",
    "exit_threshold": 0.5, "cascade_threshold": 0.5, "penalty_alpha": 0.5,
    "logit_bias": {1: 1.0}, "bad_words": ((1,),), "allowed_token_ids": (1, 2), "structured_outputs": {"regex": "a"},
    "min_tokens": 1, "max_tokens": 5, "stop": ("a",), "stop_token_ids": (1,), "include_stop_str_in_output": True,
    "ignore_eos": True, "seed": 1, "logprobs": 0, "prompt_logprobs": 0, "verification": "block",
    "skip_special_tokens": False, "priority": 1, "beam": BeamSearchParams(), "refine": RefineParams(),
    "timestamps": TimestampParams(first=9, end=5), "adapter": "mine",
}  # fmt: skip
DETAILS = {
    "xtc_threshold", "mirostat_eta", "dry_base", "dry_allowed_length", "dry_breakers", "dry_range", "contrastive_alpha",
    "defer_at", "logprobs_mode", "exit_criterion", "exit_decay", "exit_slope", "exit_audit", "cascade_criterion",
    "cascade_audit", "prompt_logprobs_start",
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {"penalty_alpha": {"top_k": 4}, "beam": BeamSearchParams().shared()}


@pytest.fixture
def engine() -> Engine:
    config = EngineConfig(SchedulerConfig(4, 8, 64), CacheConfig(12, 4))
    return Engine(Deferred(FakeRunner(12, 4), 1), config, vocab_size=VOCAB)


def refusal(engine: Engine, strategy: Strategy, params: SamplingParams, **more: Any) -> str:
    """Why it is refused by this rule; empty where another reason, or none, is given."""
    try:
        engine.abort(engine.add([1], params, strategy=strategy, **more).id)
    except AdmissionError as error:
        return str(error) if "does not use" in str(error) else ""
    return ""


def test_every_sampling_field_is_listed() -> None:
    assert set(SET) | DETAILS == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("field", SET)
def test_a_custom_strategy_refuses_fields_that_it_does_not_use(engine: Engine, field: str) -> None:
    params = SamplingParams(**{**BESIDE.get(field, {}), field: SET[field]})
    for strategy, heeds in ((Plain(), frozenset()), (Drawing(), DRAWN)):
        said = refusal(engine, strategy, params)
        assert bool(said) == (field not in COMMON | heeds)
        if said:
            assert re.fullmatch(rf"the strategy {type(strategy).__name__} does not use .*; leave these fields out", said)
            assert re.search(rf"\b{field}\b", said)


def test_processors_are_such_a_field(engine: Engine) -> None:
    nudge = (LengthNudge(end_id=0, start=1),)
    for strategy in (Plain(), BeamSearch(BeamSearchParams()), ContrastiveSearch(), Scoring()):
        assert "does not use processors" in refusal(engine, strategy, SamplingParams(), processors=nudge)
    assert not refusal(engine, Sampling(), SamplingParams(), processors=nudge)


def test_neutral_values_are_not_refused(engine: Engine) -> None:
    """Neutral values, and details of what is off."""
    for changes in (
        {},
        {"temperature": 0.0},
        {"temperature": 1},
        {"best_of": 1},
        {"dry_base": 2.0},
        {"logprobs_mode": "processed"},
    ):
        assert not refusal(engine, Plain(), SamplingParams(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "dropped"),
    [
        (Sampling(), {"best_of", "penalty_alpha", "beam", "refine"}),
        (BestOf(), {"penalty_alpha", "beam", "refine"}),
        (Scoring(), set(SET) - COMMON - {"prompt_logprobs"}),
        (ContrastiveSearch(), set(SET) - COMMON - {"top_k", "penalty_alpha", "min_tokens"}),
        (Refine(RefineParams(), 1, 64), set(SET) - COMMON - {"refine"}),
        (BeamSearch(BeamSearchParams()), set(SET) - COMMON - {"beam", "n", "temperature", "min_tokens", "structured_outputs"}),
    ],
)
def test_the_built_in_strategies_declare_their_fields(engine: Engine, strategy: Strategy, dropped: set[str]) -> None:
    found = {
        field
        for field in SET
        if re.search(rf"\b{field}\b", refusal(engine, strategy, SamplingParams(**{**BESIDE.get(field, {}), field: SET[field]})))
    }
    assert found == dropped
