"""Beam search on the native core: the hypotheses of torch, mixed loads on tiny pools, broken variants."""

import pytest

from headrace import core
from headrace.data.params import SamplingParams
from headrace.decoding.beam import BeamSearchParams
from headrace.engine.engine import Engine
from headrace.models.base import Model
from tests.beams import (
    CASES,
    EOS,
    DifferentError,
    assert_the_books_show,
    beams,
    fork_after_free,
    mixed,
    no_copy_on_write,
    unchecked,
)
from tests.tiny import finish

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

from tests.tiny_native import native_engine, native_model
from tests.ulps import ulps


@pytest.mark.parametrize("name", CASES)
def test_scores_equal_scoring_and_most_hypotheses_equal_torch(name: str) -> None:
    """The core's bfloat16 moves scores a little, so near ties may go the other way."""
    model = native_model("llama", vocab_size=11)
    same = 0
    for prompt in ([1, 2, 4, 5, 6], [7, 8, 9, 10, 4, 5], [4, 9]):
        ours = beams(model, prompt, CASES[name], frozenset({EOS, 7}), native_engine)
        theirs = beams(model, prompt, CASES[name], frozenset({EOS, 7}))
        same += ours[0][0] == theirs[0][0]
        for tokens, score in ours:
            expected = scored(model, prompt, tokens)
            assert score == pytest.approx(expected, abs=ulps(expected, len(tokens)))
    assert same >= 1


def scored(model: Model, prompt: list[int], tokens: list[int]) -> float:
    """The tokens' log-probability, fed in one piece."""
    engine = native_engine(model)
    request = engine.add(prompt + tokens, SamplingParams(prompt_logprobs=0, max_tokens=1))
    finish(engine)
    return sum(entry.logprob for entry in request.prompt_logprobs[len(prompt) :] if entry is not None)


def test_beams_groups_and_samples_with_preemption() -> None:
    model = native_model("llama", vocab_size=11)
    assert sum(mixed(None, native_engine, model, 28, seed) for seed in range(6)) >= 3


def test_outputs_show_blocks_that_are_written_by_two() -> None:
    with pytest.raises(DifferentError):
        mixed(unchecked(no_copy_on_write), native_engine, native_model("llama", vocab_size=11), 32)


def test_block_counts_reveal_blocks_that_are_freed_too_early() -> None:
    assert_the_books_show(lambda: mixed(fork_after_free, native_engine, native_model("llama", vocab_size=11), 32))


def test_beams_do_not_depend_on_chunks_and_prefix_hits() -> None:
    """Bitwise: the same scores, fed in chunks, whole, or with the prompt found in the cache."""
    model = native_model("llama", vocab_size=11)
    prompt = [4 + i % 6 for i in range(50)]
    params = BeamSearchParams(beam_width=4, n=4, max_tokens=20, ignore_eos=True)
    whole = beams(model, prompt, params, make=native_engine, blocks=400, budget=128)
    assert beams(model, prompt, params, make=native_engine, blocks=400, budget=9) == whole

    def warm(model: object, **options: int) -> Engine:
        engine = native_engine(model, **options)  # type: ignore[arg-type]
        engine.add(prompt, params.sampling())
        while engine.busy:
            engine.step()
        return engine

    assert beams(model, prompt, params, make=warm, blocks=400, budget=128) == whole
