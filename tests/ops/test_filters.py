"""Temperature and filters: boundaries, ties, neutrality, and the seeds' statements W9 to W14 about them."""

import math

import numpy as np
import pytest
import torch

from headrace.data.params import SamplingParams
from headrace.ops import filters
from tests.ops.sampling_reference import filtered, softmax

NEVER = float("-inf")


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log().float()


def kept_tokens(z: torch.Tensor) -> list[int]:
    return (z[0] > NEVER).nonzero()[:, 0].tolist()


def random_rows(n: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, spread, (n, vocab)).astype(np.float32))


def entropy(z: torch.Tensor) -> torch.Tensor:
    p = z.double().softmax(-1)
    return -(p * p.log().nan_to_num()).sum(-1)


def test_W10_the_nucleus_holds_the_token_that_crosses_p():
    z = logs(0.5, 0.3, 0.2)
    assert kept_tokens(filters.top_p(z, 0.5)) == [0]
    assert kept_tokens(filters.top_p(z, 0.51)) == [0, 1]
    assert kept_tokens(filters.top_p(z, 0.8)) == [0, 1]
    assert kept_tokens(filters.top_p(z, 0.81)) == [0, 1, 2]
    assert kept_tokens(filters.top_p(z, 1e-9)) == [0]  # at least one, always
    assert kept_tokens(filters.top_p(logs(0.2, 0.5, 0.3), 0.51)) == [1, 2]


@pytest.mark.parametrize("offset", [0.0, 7.3, -12.1, 30.0])
def test_W10_holds_wherever_the_logits_lie(offset):
    """Logits are defined up to a constant, which costs float32 digits but must not cost a token."""
    z = logs(0.5, 0.3, 0.2) + offset
    assert kept_tokens(filters.top_p(z, 0.5)) == [0]
    assert kept_tokens(filters.top_p(z, 0.51)) == [0, 1]


def test_top_p_of_one_keeps_all_despite_rounding_of_sums():
    z = random_rows(1, 5000)
    z[0, 17] = -80.0
    assert torch.equal(filters.top_p(z, 1.0), z)
    assert len(kept_tokens(filters.top_p(z, 0.5))) < 500


def test_top_p_on_ties_keeps_the_lowest_ids():
    assert kept_tokens(filters.top_p(row(0, 0, 0, 0, 0, 0, 0, 0), 0.5)) == [0, 1, 2, 3]
    assert kept_tokens(filters.top_p(row(0, 1, 0, 1, 0), 0.7)) == [0, 1, 3]
    uniform = torch.zeros(2, 6000)
    assert (filters.top_p(uniform, 0.25) > NEVER).sum(-1).tolist() == [1500, 1500]
    assert (filters.top_p(uniform, 0.25)[:, :1500] > NEVER).all()


def test_top_p_keeps_no_extra_token_if_a_sum_equals_p():
    """Sums are whole numbers of 2**-40: p is chosen so that the first token's is the goal, or one less than it."""
    z, point = row(0, -1), 2.0**40
    total = float(z.double().exp().mul(point).round().sum()) * (1 - filters.SLACK)
    assert kept_tokens(filters.top_p(z, (point - 0.5) / total)) == [0]
    assert kept_tokens(filters.top_p(z, (point + 0.5) / total)) == [0, 1]


def test_top_k_keeps_k_and_on_ties_the_lowest_ids():
    assert kept_tokens(filters.top_k(row(1, 3, 2, 5, 4), 3)) == [1, 3, 4]
    assert kept_tokens(filters.top_k(row(1, 2, 2, 2, 0), 2)) == [1, 2]
    assert kept_tokens(filters.top_k(row(7, 7, 7, 7), 3)) == [0, 1, 2]
    assert kept_tokens(filters.top_k(row(2, NEVER, NEVER, 1), 3)) == [0, 3]
    z = random_rows(1, 3000).round()  # thousands of ties
    order = np.argsort(-z[0].numpy(), kind="stable")
    for k in (1, 2, 77, 1500):
        assert kept_tokens(filters.top_k(z, k)) == sorted(order[:k].tolist())


def test_top_k_of_one_is_greedy_and_of_the_vocabulary_is_off():
    z = random_rows(4, 300)
    assert torch.equal((filters.top_k(z, 1) > NEVER).nonzero()[:, 1], z.argmax(-1))
    for off in (0, 300, 10_000):
        assert torch.equal(filters.top_k(z, off), z)


def test_W14_temperature_leaves_the_top_k_set_and_changes_its_probabilities():
    z = random_rows(1, 50)
    cold, hot = filters.top_k(filters.temperature(z, 0.5), 5), filters.top_k(filters.temperature(z, 2.0), 5)
    assert kept_tokens(cold) == kept_tokens(hot) == kept_tokens(filters.top_k(z, 5))
    assert cold.softmax(-1).max() > hot.softmax(-1).max() + 0.1


def test_min_p_is_relative_to_the_best():
    z = logs(0.4, 0.3, 0.2, 0.1)
    assert kept_tokens(filters.min_p(z, 0.5)) == [0, 1, 2]  # 0.2 is exactly half of 0.4, and stays
    assert kept_tokens(filters.min_p(z, 0.51)) == [0, 1]
    assert kept_tokens(filters.min_p(z, 1.0)) == [0]
    assert kept_tokens(filters.min_p(row(3, 3, 1), 1.0)) == [0, 1]
    assert torch.equal(filters.min_p(z, 0.0), z)


def test_typical_p_drops_the_most_likely_token_of_low_surprise():
    """-log p of the best is 0.69, the entropy 1.5: the flat middle is closer to it."""
    z = logs(0.5, 0.11, 0.1, 0.1, 0.1, 0.05, 0.04)
    p = z[0].double().softmax(-1)
    distance = (-p.log() - entropy(z)[0]).abs()
    assert distance.argmin() != 0
    first = int(distance.argmin())
    assert kept_tokens(filters.typical(z, 1e-6)) == [first]
    assert torch.equal(filters.typical(z, 1.0), z)


@pytest.mark.parametrize("seed", range(6))
def test_the_filters_equal_their_plain_definitions(seed):
    """Each against numpy in float64, on small, large, peaked and flat vocabularies."""
    rng = np.random.default_rng(seed)
    for vocab, spread in ((7, 1.0), (100, 4.0), (5000, 0.3), (5000, 3.0)):
        z = random_rows(1, vocab, seed, spread)
        for name, value in [
            ("top_k", int(rng.integers(1, vocab))),
            ("top_p", float(rng.uniform(0.05, 0.999))),
            ("typical_p", float(rng.uniform(0.05, 0.999))),
            ("min_p", float(rng.uniform(0.001, 0.9))),
        ]:
            stage = getattr(filters, name.removesuffix("_p") if name == "typical_p" else name)
            expected = filtered(z[0].double().numpy(), SamplingParams(**{name: value}))
            assert kept_tokens(stage(z, value)) == np.flatnonzero(expected > -np.inf).tolist(), (name, value, vocab)


def test_a_setting_for_each_row():
    z = random_rows(3, 200)
    for stage, values in [
        (filters.top_k, torch.tensor([1, 0, 20])),
        (filters.top_p, torch.tensor([0.1, 1.0, 0.9])),
        (filters.typical, torch.tensor([0.1, 1.0, 0.9])),
        (filters.min_p, torch.tensor([0.9, 0.0, 0.1])),
        (filters.temperature, torch.tensor([0.3, 1.0, 2.0])),
    ]:
        alone = torch.cat([stage(z[i : i + 1], float(values[i])) for i in range(3)])
        assert torch.equal(stage(z, values), alone)
        assert torch.equal(stage(z, values)[1], z[1])  # neutral there


@pytest.mark.parametrize("width", [6, 60, 600])
def test_rows_of_a_batch_know_nothing_of_each_other(width):
    """Rows full of equals, far apart, one with a single token: each is what it is alone."""
    z = random_rows(5, width, seed=width, spread=1.5).round() + torch.tensor([[0.0], [400.0], [-400.0], [7.0], [0.0]])
    z[4] = NEVER
    z[4, 2] = 1.0
    stages = {
        filters.top_k: [4, 5, 1, 3, 2],
        filters.top_p: [0.4, 0.95, 0.6, 1.0, 0.2],
        filters.typical: [0.4, 0.95, 0.6, 1.0, 0.2],
        filters.min_p: [0.5, 0.1, 0.9, 0.0, 0.3],
        filters.top_n_sigma: [0.5, 1.0, 0.1, 2.0, 1.0],
        filters.xtc: [0.1, 0.01, 0.001, 0.3, 0.1],
        filters.surprise: [2.0, 0.5, 4.0, 1.0, 3.0],
    }
    for stage, values in stages.items():
        alone = torch.cat([stage(z[i : i + 1], value) for i, value in enumerate(values)])
        assert torch.equal(stage(z, torch.tensor(values)), alone), stage.__name__
        if stage is not filters.xtc or width > 6:
            assert not torch.equal(alone, z), stage.__name__
    for measure in (filters.reachable, filters.log_total):
        assert torch.equal(measure(z), torch.cat([measure(each[None]) for each in z]))
    assert kept_tokens(filters.reachable(row(0, 400, 399))) == [1, 2]


def test_typical_takes_of_equals_on_both_sides_of_the_entropy_the_lowest_ids():
    """Logits 0 and -1 about a mean of exactly -1/2: equally typical, and not equally likely, so their order tells."""
    few = torch.tensor([-3.375, -8.125, -10.625, -15.875, -18.375, -21.75, -26.375, -29.125])  # these put the mean there
    both = torch.tensor([0.0] * 30 + [-1.0] * 81)[torch.from_numpy(np.random.default_rng(3).permutation(111))]
    z = torch.cat([few, both])[None]
    shares = (z[0].double().exp() * filters.POINT).round()
    assert float((z[0].double() * z[0].double().exp() * filters.POINT).round().sum() / shares.sum()) == -0.5
    for p in (0.05, 0.3, 0.5, 0.71, 0.9):
        reached = (shares[8:].cumsum(0) < shares.sum() * p * (1 - filters.SLACK)).sum()
        assert kept_tokens(filters.typical(z, p)) == list(range(8, 8 + int(reached) + 1))


@pytest.mark.parametrize("stage", [filters.top_p, filters.typical])
def test_a_threshold_of_one_keeps_every_token(stage):
    """Sums beyond 2**53 and tokens that weigh nothing; a first token that may not come, alone and beside rows that are cut."""
    flat = torch.zeros(1, 20_000)
    flat[0, 5000:] = -40.0
    flat[0, :300] = -41.0
    for z in (flat, torch.cat([torch.zeros(1, 20_000), torch.full((1, 9), -40.0)], -1)):
        assert torch.equal(stage(z, 1.0), z)
    barred = random_rows(2, 64)
    barred[:, 0] = NEVER
    assert torch.equal(stage(barred, 1.0), barred)
    assert torch.equal(stage(barred, torch.tensor([0.5, 1.0]))[1], barred[1])


def test_neutral_settings_leave_every_bit():
    z = random_rows(3, 500)
    z[0, 3], z[1, 4] = NEVER, -0.0
    for stage, neutral in [
        (filters.temperature, 1.0),
        (filters.top_k, 0),
        (filters.top_p, 1.0),
        (filters.typical, 1.0),
        (filters.min_p, 0.0),
    ]:
        assert torch.equal(stage(z, neutral).view(torch.int32), z.view(torch.int32))


def test_filters_do_not_change_their_argument():
    z = random_rows(2, 100)
    before = z.clone()
    for stage, value in [
        (filters.temperature, 2.0),
        (filters.top_k, 3),
        (filters.top_p, 0.5),
        (filters.typical, 0.5),
        (filters.min_p, 0.5),
    ]:
        stage(z, value)
        assert torch.equal(z, before)


def test_a_row_without_any_token_stays_so():
    z = torch.full((2, 20), NEVER)
    z[1, 4] = 1.0
    for stage, value in [(filters.top_k, 3), (filters.top_p, 0.5), (filters.typical, 0.5), (filters.min_p, 0.5)]:
        out = stage(z, value)
        assert (out[0] == NEVER).all()
        assert kept_tokens(out[1:]) == [4]


def test_entropy_grows_with_temperature():
    z = random_rows(20, 64)
    entropies = torch.stack([entropy(filters.temperature(z, t)) for t in (0.1, 0.3, 0.7, 1.0, 1.5, 3.0, 10.0, 100.0)])
    assert (entropies.diff(dim=0) > 0).all()


def test_temperature_sets_the_odds():
    z = row(2.0, 0.5, -1.0)
    for t in (0.5, 1.0, 2.0):
        p = filters.temperature(z, t)[0].double().softmax(-1)
        assert math.isclose(p[0] / p[2], math.exp(3.0 / t), rel_tol=1e-6)


def test_W11_temperature_is_usable_without_top_p():
    z = random_rows(1, 64)
    assert torch.equal(filters.temperature(z, 2.0), z / 2.0)
    assert len(kept_tokens(filters.temperature(z, 2.0))) == 64


def test_W12_towards_zero_the_best_takes_all_and_towards_infinity_all_are_alike():
    z = row(1.0, 0.9, NEVER, -3.0)
    cold, hot = filters.temperature(z, 1e-4).softmax(-1)[0], filters.temperature(z, 1e6).softmax(-1)[0]
    assert cold.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert torch.allclose(hot, torch.tensor([1 / 3, 1 / 3, 0.0, 1 / 3]), atol=1e-5)  # uniform on the support


def test_W13_log_probabilities_over_T_give_the_same_distribution():
    """softmax(log p / T) = softmax(z / T): the constant cancels. A probability of 0 stays 0, without NaN."""
    z = random_rows(1, 64)
    for t in (0.3, 1.0, 2.5):
        ours = filters.temperature(z, t).softmax(-1)
        theirs = filters.temperature(z.softmax(-1).log(), t).softmax(-1)
        assert (ours - theirs).abs().max() <= 1e-6
    with_zero = row(1.0, NEVER, 0.0)
    p = filters.temperature(with_zero.softmax(-1).log(), 0.5).softmax(-1)
    assert p[0, 1] == 0
    assert np.allclose(p[0].numpy(), softmax(np.array([2.0, -np.inf, 0.0])), atol=1e-6)


def test_head_is_the_start_of_a_stable_sort():
    z = random_rows(5, 400).round()
    for width in (0, 1, 3, 50, 400):
        values, columns = filters.top_values(z, width)
        order = np.argsort(-z.numpy(), axis=-1, kind="stable")[:, :width]
        assert np.array_equal(columns.numpy(), order)
        assert torch.equal(values, z.gather(-1, columns))


def test_compact_and_expand_are_inverse():
    z = random_rows(3, 400)
    few = filters.top_k(z, torch.tensor([1, 7, 30]))
    short, ids = filters.compact(few)
    assert ids is not None
    assert short.shape == (3, 30)
    assert torch.equal(filters.expand(short, ids, 400), few)
    again, fewer = filters.compact(filters.top_k(short, 2), ids)
    assert fewer is not None
    assert torch.equal(filters.expand(again, fewer, 400), filters.top_k(few, 2))
    assert filters.compact(z) == (z, None)  # nothing to leave out
