"""Contrastive decoding's arithmetic: the logit form is the probability form, and the limits are what they must be."""

import math

import pytest
import torch

from headrace.ops.contrast import contrast

VOCAB, ROWS = 50, 40


def rows(seed: int, width: int = VOCAB) -> torch.Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def by_probabilities(expert: torch.Tensor, amateur: torch.Tensor, alpha: float, beta: float) -> torch.Tensor:
    """p_e * (p_e / p_a) ** beta over the plausible tokens, normalised (Li et al. 2022, O'Brien and Lewis 2023)."""
    e, a = expert.softmax(-1), amateur.softmax(-1)
    plausible = e >= alpha * e.amax(-1, keepdim=True)
    weights = torch.where(plausible, e * (e / a) ** beta, 0.0)
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("alpha", [0.0, 0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 2.0])
def test_the_logit_form_is_the_probability_form(alpha: float, beta: float) -> None:
    expert, amateur = rows(1), rows(2)
    mine = contrast(expert, amateur, alpha, beta)
    theirs = by_probabilities(expert, amateur, alpha, beta)
    assert torch.equal(mine > -math.inf, theirs > 0)
    torch.testing.assert_close(mine.softmax(-1), theirs, rtol=0, atol=1e-12)


def test_the_expert_decides_if_the_amateur_has_no_effect() -> None:
    expert, amateur = rows(1), rows(2)
    best = expert.argmax(-1)
    for result in (
        contrast(expert, amateur, 0.1, 0.0),
        contrast(expert, amateur, 1.0, 0.5),
        contrast(expert, expert, 0.1, 0.5),
    ):
        assert torch.equal(result.argmax(-1), best)


def test_the_mask_is_needed() -> None:
    """Without it a token that the expert finds absurd, and the amateur even more so, wins."""
    expert, amateur = rows(1), rows(2)
    masked, free = contrast(expert, amateur, 0.1, 2.0), contrast(expert, amateur, 0.0, 2.0)
    plausible = expert >= expert.amax(-1, keepdim=True) + math.log(0.1)
    assert plausible.gather(-1, masked.argmax(-1, keepdim=True)).all()
    assert not plausible.gather(-1, free.argmax(-1, keepdim=True)).all()


def test_padding_beyond_the_amateurs_vocabulary_is_excluded() -> None:
    wide = contrast(rows(1), rows(2, VOCAB - 7), 0.0, 0.5)
    assert (wide[:, VOCAB - 7 :] == -math.inf).all()
    assert (wide[:, : VOCAB - 7] > -math.inf).all()
    torch.testing.assert_close(wide[:, : VOCAB - 7], contrast(rows(1)[:, : VOCAB - 7], rows(2, VOCAB - 7), 0.0, 0.5))
    assert contrast(rows(1, VOCAB - 7), rows(2), 0.0, 0.5).shape == (ROWS, VOCAB - 7)
