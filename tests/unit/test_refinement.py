"""What a pass over a block keeps and masks again, and which requests may ask for that."""

import re

import pytest

from benchmarks.fake_model import VOCAB, Deferred, FakeRunner
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.explicit import params_of
from headrace.data.params import BeamSearchParams, ParamError, RefineParams, SamplingParams
from headrace.data.plan import Each, Failed, Ranked
from headrace.engine.engine import AdmissionError, Engine
from headrace.ops.refinement import MaskedBlock, empty, guesses, masked_after, refine

MASK = 0


@pytest.mark.parametrize(
    ("size", "passes", "left"),
    [
        (8, 1, [0]),
        (8, 2, [4, 0]),
        (8, 4, [6, 4, 2, 0]),
        (8, 3, [5, 2, 0]),
        (10, 4, [7, 5, 2, 0]),
        (5, 5, [4, 3, 2, 1, 0]),
        (1, 1, [0]),
    ],
)
def test_how_many_are_masked_after_each_pass(size: int, passes: int, left: list[int]) -> None:
    assert [masked_after(size, passes, done) for done in range(1, passes + 1)] == left
    block = empty(size, MASK)
    for done, masks in enumerate(left, 1):
        block = refine(block, [(7 + at, -1.0 - at) for at in range(size)], passes, MASK)
        assert (block.tokens.count(MASK), block.done) == (masks, done)


def test_the_least_confident_tokens_are_masked_again() -> None:
    first = refine(empty(4, MASK), [(5, -0.1), (6, -2.0), (7, -0.5), (8, -1.0)], 2, MASK)
    assert first == MaskedBlock((5, MASK, 7, MASK), (-0.1, float("-inf"), -0.5, float("-inf")), 1)
    second = refine(first, [(1, -9.0), (2, -0.2), (3, -9.0), (4, -0.3)], 2, MASK)
    assert second.tokens == (5, 2, 7, 4)  # what was kept is as it was, whatever the pass says of it
    assert second.sure == (-0.1, -0.2, -0.5, -0.3)


def test_earlier_tokens_are_masked_again_unless_kept_stay() -> None:
    before = MaskedBlock((5, MASK, MASK), (-3.0, float("-inf"), float("-inf")), 1)
    found = [(9, 0.0), (6, -0.1), (7, -0.2)]
    assert refine(before, found, 3, MASK).tokens == (MASK, 6, 7)
    assert refine(before, found, 3, MASK, kept_stay=True).tokens == (5, 6, MASK)


def test_of_equals_the_last_are_masked() -> None:
    assert refine(empty(4, MASK), [(5, -1.0)] * 4, 2, MASK).tokens == (5, 5, MASK, MASK)


def test_a_guess_is_never_the_mask() -> None:
    assert guesses(Each((Ranked((0, 4), (-0.1, -3.0)), Ranked((5, 0), (-0.2, -0.3)))), MASK) == [(4, -3.0), (5, -0.2)]
    with pytest.raises(ValueError, match="broken"):
        guesses(Each((Failed("broken"),)), MASK)
    with pytest.raises(ValueError, match="broken"):
        guesses(Failed("broken"), MASK)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"refine_block": 65}, "refine_block must be between 1 and 64, not 65"),
        ({"refine_block": 4, "refine_passes": 0}, "refine_passes must be between 1 and 64, not 0"),
        ({"refine_passes": 2}, "refine_passes goes with refine_block"),
        ({"refine_block": 4, "refine_remask": "all"}, "refine_remask must be any or masked"),
        ({"refine_block": 4, "temperature": 0.7}, "leave out temperature, or refine"),
        ({"refine_block": 4, "n": 2}, "leave out n, or refine"),
        ({"refine_block": 4, "beam_width": 2}, "refine"),
        ({"refine_block": 4, "penalty_alpha": 0.5, "top_k": 4}, "refine"),
    ],
)
def test_invalid_refinement_parameters_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ParamError, match=said):
        params_of(given)


def test_sampling_defaults_of_the_model_do_not_apply() -> None:
    own = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 40}
    assert params_of({"refine_block": 8}, own) == SamplingParams(refine=RefineParams(block=8), max_tokens=40)
    assert params_of({"refine": RefineParams()}, own).temperature == 1.0


def test_a_known_length_ends_the_answer() -> None:
    assert SamplingParams(refine=RefineParams(length=5)).max_tokens == 5
    assert SamplingParams(refine=RefineParams(length=5), max_tokens=3).max_tokens == 3
    assert SamplingParams(refine=RefineParams(length=50), max_tokens=None).max_tokens == 50


def engine(mask: int | None, budget: int = 16) -> Engine:
    config = EngineConfig(SchedulerConfig(4, budget, 64), CacheConfig(40, 4))
    return Engine(Deferred(FakeRunner(40, 4), 1), config, vocab_size=VOCAB, mask_id=mask)


def test_a_model_without_a_mask_is_refused() -> None:
    params = SamplingParams(refine=RefineParams(block=4))
    with pytest.raises(AdmissionError, match=re.escape("refine needs a mask token (mask_token_id in config.json)")):
        engine(None).add([1, 2], params)
    engine(3).add([1, 2], params)


def test_a_block_must_fit_into_a_step() -> None:
    with pytest.raises(AdmissionError, match="lower top_k or refine_block"):
        engine(3).add([1, 2], SamplingParams(refine=RefineParams(block=16)))


def test_beams_with_blocks_are_refused() -> None:
    with pytest.raises(ParamError, match="leave out beam, or refine"):
        SamplingParams(refine=RefineParams(), **{"beam": BeamSearchParams(), **BeamSearchParams().shared()})
