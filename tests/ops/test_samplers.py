"""DRY, XTC, top-n-sigma and mirostat: definitions, boundaries, distributions with wrong variants, drafts."""

import math

import numpy as np
import pytest
import torch

from headrace.data.params import ParamError, SamplingParams
from headrace.ops import filters
from headrace.ops.keys import Purpose, key
from headrace.ops.noise import coins, reference_philox
from headrace.ops.penalties import dry
from headrace.ops.sampling import RowSpec, process, sample
from tests.ops.sampling_reference import (
    ALPHA,
    LOGITS,
    SEEDS,
    N,
    distribution,
    dry_costs,
    edited,
    filtered,
    keep,
    p_value,
    softmax,
    without_top,
)

NEVER = float("-inf")


def kept_tokens(z: torch.Tensor) -> list[int]:
    return (z[0] > NEVER).nonzero()[:, 0].tolist()


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log().float()


def counts(params: SamplingParams, drawn_by: list, tokens: list[int], logits=LOGITS) -> np.ndarray:
    (result,) = sample(torch.from_numpy(logits)[None], [RowSpec(params, drawn_by, tokens, prompt_len=1)])
    return np.bincount(result.tokens, minlength=len(logits))


# -- DRY ---------------------------------------------------------------------------------------------------------------


def test_dry_penalizes_tokens_that_extend_a_repetition():
    params = SamplingParams(dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=2)
    history = [1, 2, 3, 4, 9, 1, 2, 3]
    assert dry(history, params) == {4: pytest.approx(1.6)}  # 1 2 3 matched: 0.8 * 2 ** (3 - 2)
    assert dry(history, params.replace(dry_allowed_length=4)) == {}
    assert dry(history, params.replace(dry_breakers=(2,))) == {}  # only 3 matches on this side of the breaker
    assert dry(history, params.replace(dry_breakers=(3,))) == {}
    assert dry(history, params.replace(dry_breakers=(4,))) == {}  # a breaker itself may always come
    assert dry(history, params.replace(dry_range=5)) == {}
    assert dry([7] * 40, params) == {7: 1e4}  # a bounded cost


def test_dry_equals_brute_force():
    rng = np.random.default_rng(0)
    found = 0
    for case in range(300):
        history = rng.integers(0, 3 + case % 3, rng.integers(0, 30)).tolist()
        params = SamplingParams(
            dry_multiplier=1.0,
            dry_base=1.5,
            dry_allowed_length=int(rng.integers(1, 4)),
            dry_breakers=() if case % 2 else (0,),
            dry_range=int(rng.choice([0, 0, 9])),
        )
        expected = dry_costs(history, params)
        assert dry(history, params) == pytest.approx(expected)
        found += bool(expected)
    assert found > 50


# -- XTC ---------------------------------------------------------------------------------------------------------------


def test_xtc_keeps_the_least_likely_of_the_top_choices():
    z = logs(0.4, 0.3, 0.2, 0.1)
    assert kept_tokens(filters.xtc(z, 0.15)) == [2, 3]
    assert kept_tokens(filters.xtc(z, 0.2)) == [2, 3]  # 0.2 itself is a top choice
    assert kept_tokens(filters.xtc(z, 0.35)) == [0, 1, 2, 3]  # a single one stays
    assert kept_tokens(filters.xtc(z, 0.5)) == [0, 1, 2, 3]
    assert kept_tokens(filters.xtc(logs(0.25, 0.25, 0.25, 0.25), 0.1)) == [3]  # of equals the lowest id is the likelier


def test_the_coin_is_a_word_of_its_own_purpose():
    for seed, position in [(0, 0), (7, 3), (2**64 - 1, 2**31 - 1)]:
        counter = np.array([position, 0, Purpose.COIN, 0], dtype=np.uint32)
        word = reference_philox(counter, np.array(key(seed), dtype=np.uint32))[0]
        assert coins(torch.tensor([key(seed)]), torch.tensor([position])).tolist() == [word / 2**32]


@pytest.mark.parametrize("seed", SEEDS)
def test_xtc_mixes_both_distributions_by_its_probability(seed, keys):
    params = SamplingParams(xtc_probability=0.3, xtc_threshold=0.08)
    some = keys[seed][: N // 5]
    observed = counts(params, some, [0, 4])
    plain, without = softmax(LOGITS.astype(np.float64)), softmax(without_top(LOGITS.astype(np.float64), 0.08))
    assert p_value(observed, 0.7 * plain + 0.3 * without) > ALPHA
    assert p_value(observed, 0.6 * plain + 0.4 * without) < ALPHA  # another coin
    removes_all = softmax(keep(LOGITS.astype(np.float64), np.flatnonzero(plain < 0.08)))
    assert p_value(observed, 0.7 * plain + 0.3 * removes_all) < ALPHA  # the least likely must stay


# -- top-n-sigma -------------------------------------------------------------------------------------------------------


def test_top_n_sigma_does_not_depend_on_the_temperature():
    z = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (8, 4000)).astype(np.float32))
    for n in (0.5, 1.0, 3.0):
        plain = filters.top_n_sigma(z, n) > NEVER
        assert 1 <= plain.sum(-1).min() <= plain.sum(-1).max() < 4000
        for temperature in (0.02, 0.5, 4.0):
            assert torch.equal(filters.top_n_sigma(z / temperature, n) > NEVER, plain)


def test_sigma_is_taken_over_possible_tokens():
    z = torch.tensor([[0.0, 1.0, 2.0, NEVER, NEVER]])
    assert kept_tokens(filters.top_n_sigma(z, 1.0)) == [2]  # sigma 0.816
    assert kept_tokens(filters.top_n_sigma(z, 1.3)) == [1, 2]
    assert kept_tokens(filters.top_n_sigma(torch.full((1, 5), 4.0), 1.0)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        pytest.param(
            {"top_n_sigma": 1.0},  # the mistake: sigma of the probabilities
            lambda: keep(LOGITS, np.flatnonzero(softmax(LOGITS) >= softmax(LOGITS).max() - softmax(LOGITS).std())),
            id="top-n-sigma",
        ),
        pytest.param(
            {"dry_multiplier": 0.5, "dry_allowed_length": 1},  # the mistake: the length of the match does not count
            lambda: LOGITS - 0.5 * np.isin(np.arange(16), [5, 6]),
            id="DRY",
        ),
    ],
)
def test_draws_follow_the_distribution_and_not_the_wrong_one(changes, wrong, seed, keys):
    params = SamplingParams(**changes)
    tokens = [3, 4, 5, 9, 4, 6, 3, 4]
    observed = counts(params, keys[seed], tokens)
    expected = distribution(LOGITS, params, tokens[:1], tokens[1:])
    assert p_value(observed, expected) > ALPHA
    assert p_value(observed, softmax(np.asarray(wrong(), dtype=np.float64))) < ALPHA


# -- mirostat ----------------------------------------------------------------------------------------------------------


def test_mirostat_keeps_low_surprise_tokens_and_the_best():
    z = logs(0.5, 0.25, 0.125, 0.125)
    assert kept_tokens(filters.surprise(z, 1.0)) == [0]
    assert kept_tokens(filters.surprise(z, 2.0)) == [0, 1]
    assert kept_tokens(filters.surprise(z, 3.0)) == [0, 1, 2, 3]
    assert kept_tokens(filters.surprise(z, -5.0)) == [0]


def surprises(params: SamplingParams, steps: int, feedback: bool = True) -> np.ndarray:
    """Bits of surprise of one long output, drawn from logits that change in spread from token to token."""
    rng = np.random.default_rng(1)
    tokens, mu, bits = [0], None, []
    for _ in range(steps):
        z = rng.normal(0, rng.uniform(1, 3), (1, 500)).astype(np.float32)
        (result,) = sample(torch.from_numpy(z), [RowSpec(params, [key(3)], tokens, 1, mu=mu)])
        if feedback:
            (mu,) = result.mus
        tokens.append(result.tokens[0])
        bits.append(-np.log2(softmax(z[0].astype(np.float64))[tokens[-1]]))
    return np.array(bits)


@pytest.mark.parametrize("tau", [4.0, pytest.param(5.0, marks=pytest.mark.slow)])
def test_mirostat_steers_the_mean_surprise_to_its_target(tau):
    params = SamplingParams(mirostat_tau=tau, mirostat_eta=0.2)
    assert surprises(params, 600)[100:].mean() == pytest.approx(tau, abs=0.15)
    assert abs(surprises(params, 600, feedback=False)[100:].mean() - tau) > 0.3  # the control: mu stays where it began


@pytest.mark.parametrize("seed", SEEDS)
def test_mirostat_draws_from_its_kept_tokens(seed, keys):
    params = SamplingParams(mirostat_tau=2.0, temperature=0.8)
    observed = counts(params, keys[seed][: N // 4], [0, 4])
    scaled = LOGITS.astype(np.float64) / 0.8
    expected = softmax(keep(scaled, np.flatnonzero(-np.log2(softmax(scaled)) <= 4.0)))
    assert 1 < np.count_nonzero(expected) < 16
    assert p_value(observed, expected) > ALPHA
    assert p_value(observed, softmax(keep(scaled, np.flatnonzero(-np.log(softmax(scaled)) <= 4.0)))) < ALPHA  # nats for bits


# -- all of them -------------------------------------------------------------------------------------------------------


def test_neutral_values_leave_every_bit():
    z = torch.from_numpy(np.random.default_rng(2).normal(0, 3, (1, 5000)).astype(np.float32))
    z[0, 1], z[0, 2] = -0.0, NEVER
    neutral = SamplingParams(dry_multiplier=0.0, xtc_probability=0.0, top_n_sigma=0.0, mirostat_tau=0.0)
    assert torch.equal(process(z, [RowSpec(neutral, [key(0)], [1, 2, 3, 1, 2], 2)]).view(torch.int32), z.view(torch.int32))
    idle = SamplingParams(dry_multiplier=5.0, xtc_probability=1.0, xtc_threshold=0.5)  # nothing repeats, nothing is that likely
    assert torch.equal(process(z, [RowSpec(idle, [key(0)], [1, 2, 3], 2)]).view(torch.int32), z.view(torch.int32))
    busy = process(z, [RowSpec(idle, [key(0)], [1, 2, 3, 1, 2], 2)])
    assert (busy != z).nonzero()[:, 1].tolist() == [3]


@pytest.mark.parametrize(
    "setting", [{"dry_multiplier": 2.0, "dry_allowed_length": 1}, {"xtc_probability": 0.5}, {"top_n_sigma": 1.0}]
)
def test_at_a_draft_node_the_path_is_history(setting):
    """The row after a draft is the row of the sequence that has the draft as its tokens."""
    params = SamplingParams(**setting)
    z = torch.from_numpy(np.random.default_rng(5).normal(0, 1, (1, 12)).astype(np.float32))
    for seed in range(40):
        tokens = np.random.default_rng(seed).integers(0, 4, 9).tolist()
        drafted = RowSpec(params, [key(seed)], tokens[:5], 2, path=tokens[5:])
        committed = RowSpec(params, [key(seed)], tokens, 2)
        (one,), (two,) = sample(z, [drafted]), sample(z, [committed])
        assert one.tokens == two.tokens
        assert torch.equal(process(z, [drafted]), process(z, [committed]))


def test_the_path_matters_to_dry():
    """Negative control of the test above: a sampler that forgets the path sees another distribution."""
    params = SamplingParams(dry_multiplier=2.0, dry_allowed_length=1)
    z = torch.zeros(1, 8)
    drafted = RowSpec(params, [key(0)], [1, 2, 3], 1, path=[1, 2])
    forgetful = RowSpec(params, [key(0)], [1, 2, 3], 1)
    assert process(z, [drafted])[0, 3] < 0
    assert not torch.equal(process(z, [drafted]), process(z, [forgetful]))


def test_the_order_of_the_stages():
    """DRY before temperature, top-n-sigma before top-k, XTC after min-p."""
    z = np.float32([2.0, 1.9, 0.5, -1.0, -4.0])
    params = SamplingParams(temperature=0.5, dry_multiplier=1.0, dry_allowed_length=1, top_n_sigma=1.2, top_k=3)
    row = RowSpec(params, [key(0)], [3, 0, 3], 1)
    ours = process(torch.from_numpy(z)[None], [row])[0].numpy()
    expected = filtered(edited(z, params, [3], [0, 3]), params)
    assert np.array_equal(ours > NEVER, expected > NEVER)
    assert ours[0] == pytest.approx((2.0 - 1.0) / 0.5)
    late = SamplingParams(min_p=0.5, xtc_probability=1.0, xtc_threshold=0.45)
    after = process(torch.from_numpy(z)[None], [RowSpec(late, [key(0)], [3], 1)])
    assert kept_tokens(after) == [1]  # without min-p neither would be as likely as 0.45


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dry_multiplier": -1}, "dry_multiplier must be between 0 .off. and 100"),
        ({"dry_base": 0.5}, "dry_base must be between 1 and 10"),
        ({"dry_base": math.nan}, "dry_base must be"),
        ({"dry_allowed_length": 0}, "dry_allowed_length must be between 1 and 64"),
        ({"dry_range": -1}, "dry_range must be 0"),
        ({"dry_breakers": [-1]}, "dry_breakers must be integers"),
        ({"xtc_probability": 1.5}, "xtc_probability must be between 0 .off. and 1"),
        ({"xtc_threshold": -0.1}, "xtc_threshold must be between 0 and 1"),
        ({"top_n_sigma": -1}, "top_n_sigma must be between 0"),
        ({"mirostat_tau": 101}, "mirostat_tau must be between 0"),
        ({"mirostat_eta": 2}, "mirostat_eta must be between 0 and 1"),
        ({"mirostat_tau": 5.0, "temperature": 0.0}, "needs sampling"),
        ({"mirostat_tau": 5.0, "top_k": 40}, "set top_k to 0"),
        ({"mirostat_tau": 5.0, "top_p": 0.9}, "set top_p to 1.0"),
        ({"n": 3, "best_of": 2}, "best_of must be between n"),
    ],
)
def test_invalid_sampler_settings_are_refused(changes, words):
    with pytest.raises(ParamError, match=words):
        SamplingParams(**changes)
