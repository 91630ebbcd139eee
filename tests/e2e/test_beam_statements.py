"""Statements of the seed documents about beam search, checked against the engine (W7, W14)."""

import itertools

import pytest
import torch

from headrace.data.params import ParamError, SamplingParams
from headrace.data.plan import Ranked
from headrace.data.types import Child, Decode, Request, Sequence
from headrace.decoding.base import Outputs
from headrace.decoding.beam import BeamSearch, BeamSearchParams
from tests.beams import EOS, beams, score_of
from tests.tiny import tiny_config, tiny_model
from tests.ulps import ulps


def test_w7_beam_search_is_not_the_exact_maximum() -> None:
    """It keeps the likeliest prefixes and looks no token ahead: some best sequences begin with a prefix it drops."""
    missed = 0
    for seed in range(4):
        model = tiny_model(tiny_config(vocab_size=5), seed=seed)
        best = max(score_of(model, [1, 2, 0], list(out)) for out in itertools.product(range(5), repeat=3))
        scores = []
        for width in (1, 25):
            params = BeamSearchParams(beam_width=width, max_tokens=3, ignore_eos=True)
            ((_, score),) = beams(model, [1, 2, 0], params, seqs=32, budget=128, blocks=300)
            scores.append(score)
        assert scores[1] == pytest.approx(best, abs=ulps(best, 3))  # three log-probabilities of float32
        missed += scores[0] < best - 1e-3
    assert missed >= 1


def test_w7_without_normalisation_short_outputs_win() -> None:
    def mean_length(penalty: float) -> float:
        lengths = []
        for seed in range(6):
            model = tiny_model(tiny_config(vocab_size=11), seed=seed)
            params = BeamSearchParams(beam_width=4, max_tokens=16, length_penalty=penalty)
            ((tokens, _),) = beams(model, [1, 2, 4, 5], params, frozenset({EOS, 7}))
            lengths.append(len(tokens))
        return sum(lengths) / len(lengths)

    assert mean_length(0.0) + 3 < mean_length(1.0)


class Tree:
    """The two-step tree of W14 as what a back end would answer, at some temperature."""

    first = torch.tensor([1.0, 0.8])
    after = (torch.tensor([0.1, 0.0]), torch.tensor([3.0, 0.0]))

    def winner(self, temperature: float) -> list[int]:
        strategy = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=2))
        root = Sequence(0, [9], 1)
        request = Request("r", [9], strategy.params.sampling(), 0, strategy, 0, seqs=[root])
        for _ in range(2):
            outputs: Outputs = [(seq, (self.answer(seq, temperature),)) for seq in request.seqs]
            families = strategy.select(request, outputs)
            request.seqs = [
                self.grown(seq, child) for (seq, _), family in zip(outputs, families, strict=True) for child in family
            ]
        request.finished, request.seqs = request.seqs, []
        strategy.done(request)
        ((best, _),) = strategy.results(request)
        return best.output

    def answer(self, seq: Sequence, temperature: float) -> Ranked:
        z = self.after[seq.output[0]] if seq.output else self.first
        logp, ids = (z / temperature).log_softmax(0).sort(descending=True)
        return Ranked(tuple(ids.tolist()), tuple(logp.tolist()))

    @staticmethod
    def grown(seq: Sequence, child: Child) -> Sequence:
        assert child.token is not None
        tokens = [*seq.tokens, child.token]
        return Sequence(0, tokens, 1, decode=Decode(score=child.score, state=child.state))


def test_w14_a_temperature_changes_beams_and_is_refused() -> None:
    assert Tree().winner(1.0) == [1, 0]
    assert Tree().winner(0.1) == [0, 0]
    with pytest.raises(ParamError, match="temperature does not go with beam search"):
        SamplingParams(beam=BeamSearchParams(), max_tokens=64, temperature=0.5)
