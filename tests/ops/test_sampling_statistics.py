"""What is drawn has the distribution that was asked for: chi-square tests, each with a wrong variant that must fail."""

import numpy as np
import pytest
import torch

from headrace.data.params import SamplingParams
from headrace.ops.keys import key
from headrace.ops.sampling import RowSpec, draw, sample
from tests.ops.sampling_reference import ALPHA, LOGITS, SEEDS, N, distribution, keep, p_value, prefix, softmax


def frequencies(params: SamplingParams, keys: list, logits=LOGITS) -> np.ndarray:
    """How often each token came in one draw per key."""
    (result,) = sample(torch.from_numpy(logits)[None], [RowSpec(params, keys, tokens=[0, 4], prompt_len=1)])
    return np.bincount(result.tokens, minlength=len(logits))


def uniform_top_k(params):
    """W9: S0 says that one of the k is picked at random."""
    kept = np.argsort(-LOGITS, kind="stable")[: params.top_k]
    return softmax(keep(np.zeros(len(LOGITS)), kept))


def without_the_crossing_token(params):
    p = softmax(LOGITS.astype(np.float64) / params.temperature)
    order = np.argsort(-p, kind="stable")
    return softmax(keep(np.log(p), prefix(order, p, params.top_p)[:-1]))


def absolute_min_p(params):
    p = softmax(LOGITS.astype(np.float64) / params.temperature)
    return softmax(keep(np.log(p), np.flatnonzero(p >= params.min_p)))


def typical_by_probability(params):
    p = softmax(LOGITS.astype(np.float64))
    return softmax(keep(np.log(p), prefix(np.argsort(-p, kind="stable"), p, params.typical_p)))


def without_temperature(params):
    return distribution(LOGITS, params.replace(temperature=1.0))


CASES = [
    pytest.param({"temperature": 0.5}, without_temperature, id="temperature 0.5"),
    pytest.param({}, lambda params: distribution(LOGITS, params.replace(temperature=1.05)), id="temperature 1"),
    pytest.param({"temperature": 2.0}, without_temperature, id="temperature 2"),
    pytest.param({"top_k": 5}, uniform_top_k, id="top-k"),
    pytest.param({"top_k": 5, "temperature": 0.7}, uniform_top_k, id="top-k with temperature"),
    pytest.param({"top_p": 0.6}, without_the_crossing_token, id="top-p"),
    pytest.param({"top_p": 0.8, "temperature": 0.7}, without_the_crossing_token, id="top-p with temperature"),
    pytest.param({"min_p": 0.1}, absolute_min_p, id="min-p"),
    pytest.param({"typical_p": 0.5}, typical_by_probability, id="typical"),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("changes", "wrong"), CASES)
def test_draws_follow_the_distribution_and_not_the_wrong_one(changes, wrong, seed, keys):
    params = SamplingParams(**changes)
    observed = frequencies(params, keys[seed])
    assert p_value(observed, distribution(LOGITS, params)) > ALPHA
    assert p_value(observed, wrong(params)) < ALPHA


@pytest.mark.parametrize("seed", SEEDS)
def test_all_stages_together(seed, keys):
    params = SamplingParams(
        temperature=1.3, top_k=12, typical_p=0.95, top_p=0.9, min_p=0.25, repetition_penalty=1.3, frequency_penalty=0.4
    )
    observed = frequencies(params, keys[seed])
    assert p_value(observed, distribution(LOGITS, params, prompt=[0], output=[4])) > ALPHA
    assert p_value(observed, distribution(LOGITS, params)) < ALPHA  # penalties left out


def test_draws_at_successive_positions_follow_the_distribution():
    """One sequence drawing again and again from the same logits: the other way in which noise is used."""
    z = torch.from_numpy(LOGITS).expand(N, -1)
    tokens = draw(z, torch.tensor([key(5, 0)]).expand(N, -1), torch.arange(N))
    observed = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    assert p_value(observed, softmax(LOGITS.astype(np.float64))) > ALPHA
    pairs = np.bincount(tokens[:-1:2].numpy() * 16 + tokens[1::2].numpy(), minlength=256)
    p = softmax(LOGITS.astype(np.float64))
    assert p_value(pairs, np.outer(p, p).reshape(-1)) > ALPHA
