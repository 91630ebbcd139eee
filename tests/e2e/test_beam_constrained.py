"""Beams held to a grammar: every hypothesis fits, scores stay the model's own, on both back ends."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.decoding.constrained import Constraint
from headrace.llm import LLM
from tests.e2e.test_constrained import CASES
from tests.tiny_files import write_tiny_gguf
from tests.ulps import ulps

PROMPT = "The mill"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("beams") / "tiny.gguf")


@pytest.fixture(scope="module", params=["torch", "native"])
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    dtype = {"dtype": "float64"} if request.param == "torch" else {}
    opened = LLM(model, backend=request.param, threads=1, device="cpu", seed=1, max_num_seqs=32, **dtype)
    yield opened
    opened.close()


def beams(llm: LLM, **more: Any) -> list[Any]:
    (output,) = llm.generate(PROMPT, BeamSearchParams(**{"beam_width": 4, "n": 4, "max_tokens": 120, **more}))
    assert output.error is None
    return output.outputs


@pytest.mark.parametrize("kind", [kind for kind in CASES if kind != "json"])  # where a random model writes blanks for ever
def test_every_hypothesis_fits(llm: LLM, kind: str) -> None:
    constraint, fits = CASES[kind]
    found = [one for one in beams(llm, structured_outputs=constraint) if one.finish_reason == "stop"]
    assert found
    assert all(fits(one.text) for one in found), [one.text for one in found]
    free = beams(llm, max_tokens=12)
    assert not any(fits(one.text) for one in free)  # the control: without the constraint they do not


def test_scores_are_the_models_own(llm: LLM) -> None:
    """A mask changes which tokens may come, and not how likely they are."""
    found = beams(llm, structured_outputs=CASES["regex"][0], length_penalty=0.0)
    prompt = llm.tokenizer.encode(PROMPT)
    assert len({tuple(one.token_ids) for one in found}) == len(found) > 1
    for one in found:
        (scored,) = llm.score([prompt + one.token_ids])
        logprobs = scored.logprobs[len(prompt) - 1 :]
        rounding = sum(ulps(logprob, 1) for logprob in logprobs)  # they are float32, their sum is not
        assert one.cumulative_logprob == pytest.approx(sum(logprobs), abs=rounding)
        assert one.score == pytest.approx(one.cumulative_logprob)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)


def test_a_wide_beam_finds_the_likeliest_choice(llm: LLM) -> None:
    """Against every way to write every choice, scored whole."""
    choices = ("yes", "no", "mill")
    (best, *_) = beams(
        llm, beam_width=32, n=1, max_tokens=8, length_penalty=0.0, early_stopping="never", ignore_eos=True,
        structured_outputs={"choice": choices},
    )  # fmt: skip
    prompt = llm.tokenizer.encode(PROMPT)
    ways = [ids for choice in choices for ids in spellings(llm, choice)]
    assert len(ways) > len(choices)
    scores = [sum(score.logprobs[len(prompt) - 1 :]) for score in llm.score([prompt + ids for ids in ways])]
    assert best.score == pytest.approx(max(scores), abs=ulps(max(scores), len(best.token_ids)))
    assert best.token_ids == ways[scores.index(max(scores))]


def spellings(llm: LLM, text: str) -> list[list[int]]:
    """Every sequence of tokens that is decoded to `text`, none of them special."""
    pieces: dict[str, list[int]] = {}
    for token in range(llm.model_config.vocab_size):
        piece = llm.tokenizer.decode([token], skip_special=True)
        if piece and "\ufffd" not in piece and text.find(piece) >= 0:
            pieces.setdefault(piece, []).append(token)
    if not text:
        return [[]]
    return [
        [token, *rest]
        for end in range(1, len(text) + 1)
        for token in pieces.get(text[:end], [])
        for rest in spellings(llm, text[end:])
    ]


def test_constrained_beams_in_a_batch_equal_those_alone(llm: LLM) -> None:
    """In one batch with free beams and samples each gives what it gives alone."""
    params: list[Any] = [
        BeamSearchParams(beam_width=4, n=2, max_tokens=40, structured_outputs=CASES["json"][0]),
        BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True),
        SamplingParams(seed=3, n=2, max_tokens=30),
        BeamSearchParams(beam_width=3, groups=3, diversity_penalty=0.5, max_tokens=40, structured_outputs=CASES["regex"][0]),
    ]
    together = llm.generate([PROMPT] * len(params), params)
    for one, settings in zip(together, params, strict=True):
        (alone,) = llm.generate(PROMPT, settings)
        assert [output.token_ids for output in one.outputs] == [output.token_ids for output in alone.outputs]


# -- a grammar that fails --------------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, where: str, fails: Callable[[int], bool]) -> list[Constraint]:
    """Have constraints fail at the calls that `fails` names; returns those that did."""
    real, calls, dead = getattr(Constraint, where), itertools.count(), []

    def method(self: Constraint, *args: Any) -> Any:
        found = real(self, *args)
        if not self.done and fails(next(calls)):
            self.error = "the grammar is worn out"
            dead.append(self)
        return b"" if self.error and where == "masks" else found

    monkeypatch.setattr(Constraint, where, method)
    return dead


@pytest.mark.parametrize("where", ["push", "masks"])
def test_a_failing_grammar_ends_only_its_hypothesis(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    settings = {"structured_outputs": CASES["regex"][0], "length_penalty": 0.0, "beam_width": 4, "n": 4}
    dead = failing(monkeypatch, where, lambda call: call % 9 == 7)
    found = beams(llm, **settings)
    assert dead
    assert found
    fits = CASES["regex"][1]
    assert all(fits(one.text) for one in found if one.finish_reason == "stop")
    assert llm.engine.blocks.used == 0
    assert len(beams(llm, max_tokens=5)) == 4


@pytest.mark.parametrize("where", ["push", "masks"])
def test_a_request_fails_when_no_hypothesis_is_left(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    dead = failing(monkeypatch, where, lambda call: call >= 6)
    params = BeamSearchParams(beam_width=4, max_tokens=40, structured_outputs=CASES["regex"][0])
    (output,) = llm.generate(PROMPT, params)
    assert dead
    assert output.error == "the grammar is worn out"
    assert llm.engine.blocks.used == 0


def test_a_grammar_failure_of_a_sampled_output_fails_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes the place of an output that was asked for."""
    failing(monkeypatch, "push", lambda call: call == 3)
    (output,) = llm.generate(PROMPT, SamplingParams(n=2, max_tokens=40, structured_outputs=CASES["regex"][0]))
    assert output.error == "the grammar is worn out"
