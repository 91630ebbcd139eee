"""Beam search in the loop: brute force, references without a cache, transformers, preemption, and broken variants."""

import itertools

import pytest
import torch

from headrace.data.params import ParamError, SamplingParams
from headrace.data.types import Request
from headrace.decoding.beam import BeamCandidate, BeamSearch, BeamSearchParams
from tests.beams import (
    CASES,
    EOS,
    DifferentError,
    add_beam,
    assert_the_books_show,
    beams,
    fork_after_free,
    mixed,
    no_copy_on_write,
    reference,
    score_of,
    unchecked,
)
from tests.models import zoo
from tests.tiny import finish, run_alone, tiny_config, tiny_engine, tiny_model
from tests.ulps import ulps


@pytest.mark.parametrize("vocab", [4, 5, 6])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_wide_beam_equals_brute_force(vocab: int, seed: int) -> None:
    model = tiny_model(tiny_config(vocab_size=vocab), seed=seed)
    length = 3
    prompt = [1, 2, 0]
    width = min(64, vocab ** (length - 1))
    best = max(itertools.product(range(vocab), repeat=length), key=lambda out: score_of(model, prompt, list(out)))
    params = BeamSearchParams(beam_width=width, max_tokens=length, ignore_eos=True)
    ((tokens, score),) = beams(model, prompt, params, seqs=64, budget=128, blocks=400)
    assert tokens == list(best)
    expected = score_of(model, prompt, tokens)
    assert score == pytest.approx(expected, abs=ulps(expected, length))  # each log-probability comes back as float32


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2"])
def test_width_one_is_greedy(architecture: str) -> None:
    model = tiny_model(tiny_config(architecture))
    prompt = [5, 6, 7, 8]
    ((tokens, _),) = beams(model, prompt, BeamSearchParams(beam_width=1, max_tokens=10))
    assert tokens == run_alone(model, prompt, SamplingParams(temperature=0.0, max_tokens=10))


def test_three_beams_make_nine_candidates_and_keep_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed's 3 x 3 = 9 -> 3. Each beam offers twice as many in truth, so that end tokens never leave fewer than three."""
    model = tiny_model(tiny_config(vocab_size=3))
    seen: list[tuple[int, int]] = []
    keep = BeamSearch._keep

    def counting(self: BeamSearch, request: Request, seq: object, candidates: list[BeamCandidate]) -> list[BeamCandidate]:
        kept = keep(self, request, seq, candidates)  # type: ignore[arg-type]
        seen.append((len(candidates), len(kept)))
        return kept

    monkeypatch.setattr(BeamSearch, "_keep", counting)
    params = BeamSearchParams(beam_width=3, n=3, max_tokens=4)
    found = beams(model, [0, 1], params)
    assert seen == [(3, 3), (9, 3), (9, 3), (9, 3)]
    assert len({tuple(tokens) for tokens, _ in found}) == 3


# -- references without a cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_beams_equal_the_reference(name: str, seed: int) -> None:
    model = tiny_model(tiny_config(vocab_size=11), seed=seed)
    prompt = [1, 2, 4, 5, 6]
    stops = frozenset({EOS, 7})
    found = beams(model, prompt, CASES[name], stops, budget=9)
    assert [tokens for tokens, _ in found] == reference(model, prompt, CASES[name], stops)
    for tokens, score in found:
        expected = score_of(model, prompt, tokens)
        assert score == pytest.approx(expected, abs=ulps(expected, len(tokens)))


def test_min_tokens_and_more_end_tokens_than_beams() -> None:
    model = tiny_model(tiny_config(vocab_size=11))
    stops = frozenset(range(3, 10))
    for least in (1, 4):
        params = BeamSearchParams(beam_width=2, n=2, max_tokens=9, min_tokens=least)
        found = [tokens for tokens, _ in beams(model, [1, 2], params, stops)]
        assert all(stops.isdisjoint(tokens[:least]) and len(tokens) > least for tokens in found)  # an end comes after as many
        assert found == reference(model, [1, 2], params, stops)
    plain = BeamSearchParams(beam_width=2, n=2, max_tokens=9)
    assert [tokens for tokens, _ in beams(model, [1, 2], plain, stops)] == reference(model, [1, 2], plain, stops)


# -- in the loop, with everything else ---------------------------------------------------------------------------------


def test_beams_and_samples_in_one_loop_with_preemption() -> None:
    assert mixed() >= 3


def test_outputs_show_blocks_that_are_written_by_two() -> None:
    with pytest.raises(DifferentError):
        mixed(unchecked(no_copy_on_write))


def test_block_counts_reveal_blocks_that_are_freed_too_early() -> None:
    assert_the_books_show(lambda: mixed(fork_after_free))


def test_w_candidates_instead_of_more_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: where only the W best continuations are looked at, end tokens crowd out the live ones."""
    candidates = BeamSearch._candidates
    monkeypatch.setattr(BeamSearch, "_candidates", lambda self, *args: candidates(self, *args)[: self.group_width])
    wrong = 0
    for seed in range(6):
        model = tiny_model(tiny_config(vocab_size=11), seed=seed)
        stops = frozenset(range(3, 8))
        found = beams(model, [1, 2, 4, 5, 6], CASES["never"], stops)
        expected = reference(model, [1, 2, 4, 5, 6], CASES["never"], stops)
        wrong += [tokens for tokens, _ in found] != expected
    assert wrong >= 2


def test_beams_share_their_blocks() -> None:
    model = tiny_model()
    engine = tiny_engine(model, blocks=200, budget=128)
    request = add_beam(engine, list(range(40)), BeamSearchParams(beam_width=6, max_tokens=12))
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, engine.blocks.used)
    assert request.finished == []
    # Ten blocks of prompt once; six copies of prompt and answer would take 6 * 13.
    assert most <= 10 + 6 * 3


# -- the seeds' statements ---------------------------------------------------------------------------------------------


def test_w14_a_temperature_inside_the_steps_changes_which_path_wins() -> None:
    first, after = torch.tensor([1.0, 0.8]), (torch.tensor([0.1, 0.0]), torch.tensor([3.0, 0.0]))

    def best(temperature: float) -> tuple[int, int]:
        scores = {
            (a, b): float((first / temperature).log_softmax(0)[a] + (after[a] / temperature).log_softmax(0)[b])
            for a in (0, 1)
            for b in (0, 1)
        }
        return max(scores, key=lambda path: scores[path])

    assert best(1.0) == (1, 0)
    assert best(0.1) == (0, 0)


def test_w46_the_sign_of_the_length_penalty() -> None:
    """Two hypotheses, -2 of length 2 and -3.5 of length 4: the flip is where 2^a / 4^a = 2 / 3.5."""
    flip = torch.log2(torch.tensor(3.5 / 2.0)).item()

    def longer_wins(penalty: float) -> bool:
        params = BeamSearchParams(length_penalty=penalty)
        return params.normalised(-3.5, 4) > params.normalised(-2.0, 2)

    assert not longer_wins(0.0)
    assert not longer_wins(flip - 0.01)
    assert longer_wins(flip + 0.01)
    assert BeamSearchParams(length_penalty=0.0).normalised(-3.5, 4) == -3.5
    assert BeamSearchParams(length_penalty=1.0).normalised(-3.5, 4) == -3.5 / 4
    gnmt = BeamSearchParams(length_penalty=0.2, length_rule="gnmt")
    assert gnmt.normalised(-3.5, 4) == pytest.approx(-3.5 / (9 / 6) ** 0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam_width": 0}, "beam_width must be between 1"),
        ({"n": 5}, "n must be between 1 and beam_width"),
        ({"groups": 3}, "must divide beam_width"),
        ({"diversity_penalty": 1.0}, "needs groups above 1"),
        ({"length_penalty": float("nan")}, "length_penalty must be between"),
        ({"early_stopping": "perhaps"}, "early_stopping must be"),
    ],
)
def test_invalid_beam_parameters_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        BeamSearchParams(**changes)


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gpt2"])
@pytest.mark.parametrize(("penalty", "early"), [(1.0, False), (0.0, True), (2.0, "never"), (-0.5, False)])
def test_the_same_hypotheses_and_scores_as_transformers(name: str, penalty: float, early: bool | str) -> None:
    theirs = zoo.oracle(name, torch.float64)
    ours = zoo.loaded(theirs, torch.float64)
    prompt = [5, 9, 2, 11, 3, 8]
    eos = 17
    result = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=12,
        do_sample=False,
        length_penalty=penalty,
        early_stopping=early,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    params = BeamSearchParams(beam_width=4, n=4, max_tokens=12, length_penalty=penalty, early_stopping=early)  # type: ignore[arg-type]
    engine = tiny_engine(ours)
    engine.eos_ids = frozenset({eos})
    request = add_beam(engine, prompt, params)
    finish(engine)
    found = request.strategy.results(request)
    for (seq, score), sequence, expected in zip(
        found, result.sequences.tolist(), result.sequences_scores.tolist(), strict=True
    ):
        assert seq.output == sequence[len(prompt) :][: len(seq.output)]
        # A token's log-probability is rounded here, and there it and the sum; then the length's power and the quotient.
        assert score == pytest.approx(expected, abs=ulps(expected, 3 * len(seq.output) + 2))
