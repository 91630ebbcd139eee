"""Block refinement in an encoder-decoder equals a reference without cache, loop or batch."""

from functools import lru_cache

import numpy as np
import pytest

from headrace.data.params import RefineParams, SamplingParams
from headrace.models.base import Model
from tests.e2e.test_refine import MASK, FromTheOpenPass, outputs, with_masks
from tests.refine_reference import dense, refined
from tests.tiny import finish, tiny_engine, tokens_of
from tests.tiny_sources import VOCAB, loaded, oracle

KINDS = ("t5", "t5-gated")
TOKENS = 11
PARAMS = [
    RefineParams(block=1),
    RefineParams(block=6, passes=1),
    RefineParams(block=6, passes=3),
    RefineParams(block=8, passes=8, length=TOKENS),
]


@lru_cache
def model_of(kind: str) -> Model:
    return loaded(oracle(kind))


def sources(count: int = len(PARAMS)) -> list[list[int]]:
    rng = np.random.default_rng(8)
    return [rng.integers(8, VOCAB - 1, int(rng.integers(3, 30))).tolist() for _ in range(count)]


def jobs() -> list[tuple[list[int], SamplingParams]]:
    pairs = zip(sources(), PARAMS, strict=True)
    return [(source, SamplingParams(refine=one, max_tokens=TOKENS)) for source, one in pairs]


def reference(model: Model, **control: bool) -> list[list[int]]:
    pairs = zip(sources(), PARAMS, strict=True)
    return [refined(dense(model, source), [model.config.start], one, MASK, TOKENS, **control) for source, one in pairs]


@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_the_reference(kind: str) -> None:
    """Together, in steps that a source alone fills, and again from sources in the cache. Control: the most confident tokens
    masked again."""
    model = model_of(kind)
    expected = reference(model)
    for budget in (64, 9):
        engine = with_masks(tiny_engine(model, budget=budget))
        assert outputs(engine, jobs()) == expected
        assert outputs(engine, jobs()) == expected
    wrong = reference(model, surest=True)
    assert [a == b for a, b in zip(wrong, expected, strict=True)] == [True, True, False, False]


def test_it_equals_the_reference_when_it_is_preempted() -> None:
    model, params = model_of("t5-gated"), SamplingParams(refine=PARAMS[2], max_tokens=24)
    engine = with_masks(tiny_engine(model, blocks=18))
    expected = [refined(dense(model, source), [model.config.start], PARAMS[2], MASK, 24) for source in sources()]
    assert outputs(engine, [(source, params) for source in sources()]) == expected
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
def test_kv_of_an_open_pass_changes_the_output(kind: str) -> None:
    """Negative control: what other tokens of the block have seen of the future stays in the pool."""
    model, one, (source, *_) = model_of(kind), PARAMS[2], sources()
    expected = refined(dense(model, source), [model.config.start], one, MASK, 24)
    engine = with_masks(tiny_engine(model))
    params = SamplingParams(refine=one, max_tokens=24)
    request = engine.add(source, params, strategy=FromTheOpenPass(one, MASK, 256))
    finish(engine)
    assert tokens_of(request)[0] != expected
    assert outputs(engine, [(source, params)]) == [expected]
