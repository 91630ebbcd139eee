"""Errors of perplexities over texts, paired with another model's, and of lost and gained answers."""

import math

import numpy as np
import pytest

from headrace.stats.paired_ratio import mcnemar, perplexity, perplexity_of_texts, perplexity_ratio


def drawn(texts: int, seed: int) -> np.ndarray:
    """Log-probabilities [texts, 50] whose texts differ more than their tokens."""
    rng = np.random.default_rng(seed)
    values: np.ndarray = -3.0 + rng.normal(size=(texts, 1)) * 0.5 + rng.normal(size=(texts, 50)) * 0.5
    return values


def test_errors_over_texts_by_hand() -> None:
    """Two texts with means -1 and -3: perplexity e², and the error of a mean of two values, 1, times that."""
    value, error = perplexity_of_texts([[-1.0, -1.0], [-3.0, -3.0]])
    assert value == pytest.approx(math.e**2)
    assert error == pytest.approx(math.e**2)
    assert perplexity_of_texts([[-1.0, -2.0]]) == (pytest.approx(math.e**1.5), None)


def test_an_error_over_texts_covers_new_texts() -> None:
    """Of 400 draws the true value lies within two errors in about 95 %. Control: tokens taken as independent cover half."""
    covered, naive = 0, 0
    for seed in range(400):
        texts = drawn(16, seed).tolist()
        value, error = perplexity_of_texts(texts)
        _, independent = perplexity([one for text in texts for one in text])
        assert error is not None
        assert independent is not None
        covered += abs(math.log(value) - 3.0) < 2 * error / value
        naive += abs(math.log(value) - 3.0) < 2 * independent / value
    assert covered > 0.9 * 400
    assert naive < 0.7 * 400


def test_a_paired_error_leaves_out_what_both_share() -> None:
    """A model that loses 0.1 nats on each token has a ratio with hardly an error, whatever the texts."""
    first = drawn(16, 0)
    own = first - 0.1 + np.random.default_rng(1).normal(size=first.shape) * 0.01
    ratio, error = perplexity_ratio(own.tolist(), first.tolist())
    assert ratio == pytest.approx(math.exp(0.1), rel=0.01)
    assert error is not None
    unpaired = perplexity_of_texts(own.tolist())[1]
    assert unpaired is not None
    assert error < 0.05 * unpaired / perplexity_of_texts(own.tolist())[0]


@pytest.mark.parametrize(("lost", "gained", "p"), [(0, 0, 1.0), (3, 3, 1.0), (0, 5, 2 / 32), (1, 9, 2 * 11 / 1024)])
def test_lost_and_gained_by_hand(lost: int, gained: int, p: float) -> None:
    assert mcnemar(lost, gained) == mcnemar(gained, lost) == pytest.approx(p)
