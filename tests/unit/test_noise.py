"""The sampling noise against its published vectors, its numpy oracle, and the Gumbel distribution."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from headrace.ops import noise
from headrace.ops.keys import Purpose, key
from headrace.ops.noise import GUMBEL_MAX, GUMBEL_MIN, REACH, coins


def bits(x) -> list[str]:
    return [f"{word:08x}" for word in np.asarray(x, dtype=np.float32).view(np.uint32).reshape(-1)]


@pytest.mark.parametrize(
    ("seed", "child", "words"),
    [
        (0, 0, (0x359CF224, 0x1FB0B259)),
        (0, 1, (0x1FB87157, 0x49A1B97C)),
        (7, 0, (0x21691462, 0xB94D4DE2)),
        (2**64 - 1, 3, (0x77617254, 0x487E24FC)),
    ],
)
def test_key_vectors(seed, child, words):
    assert key(seed, child) == words


@pytest.mark.parametrize(("seed", "child"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_a_key_outside_its_range_is_refused(seed, child):
    with pytest.raises(ValueError, match="must be between 0 and"):
        key(seed, child)


PHILOX = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((7, 5, 1, 0), (0x12345678, 0x9ABCDEF0), (0x08F26981, 0x22637527, 0x6F01ABD6, 0x50E60DD3)),
    # the two other known answers of the paper's own test suite (Random123, philox4x32-10)
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX)
def test_philox_vectors(counter, key, words):
    assert tuple(noise.philox(torch.tensor(counter), torch.tensor(key)).tolist()) == words
    assert tuple(noise.reference_philox(np.array(counter, np.uint32), np.array(key, np.uint32)).tolist()) == words


def test_gumbel_vectors():
    words = [0, 1, 0x40000000, 0x80000000, 0xFFFFFFFF, 0x6627E8D5]
    expected = ["41b6fda9", "41ae33b3", "3f9f79a2", "3ebba795", "c04851d5", "3f2cc257"]
    assert bits(noise.gumbel(torch.tensor(words))) == expected
    assert bits(noise.reference_gumbel(np.array(words, np.uint32))) == expected


def test_a_token_reads_the_lane_of_its_own_counter():
    keys, position = (0x12345678, 0x9ABCDEF0), 7
    words = noise.reference_philox(np.array([7, 5, 1, 0], np.uint32), np.array(keys, np.uint32))
    expected = bits(noise.reference_gumbel(words))
    ids = torch.tensor([[20, 21, 22, 23]])
    drawn = noise.gumbel_at(torch.tensor([keys]), torch.tensor([position]), ids, Purpose.DRAFT)
    assert bits(drawn) == expected


def test_torch_and_numpy_agree_to_the_bit():
    """On 1.2 million draws, at both ends of the counter's range."""
    draws = [(key(s, c), p, u) for s, c, p, u in [(0, 0, 0, 0), (7, 3, 131071, 1), (2**64 - 1, 9, 2**32 - 1, 4)]]
    vocab = 400_003  # not a multiple of the four lanes
    keys, positions = torch.tensor([d[0] for d in draws]), torch.tensor([d[1] for d in draws])
    ours = noise.gumbel_at(keys, positions, vocab, torch.tensor([d[2] for d in draws])).numpy()
    for row, (drawn, position, purpose) in zip(ours, draws, strict=True):
        oracle = noise.reference_gumbel_at(drawn, position, vocab, purpose)
        assert np.array_equal(row.view(np.int32), oracle.view(np.int32))


def test_torch_and_numpy_agree_where_the_definition_branches():
    edges = [0, 2**30, 2**31, 2**32 - 1]
    words = sorted({w for e in edges for w in range(max(e - 500, 0), min(e + 500, 2**32))})
    ours, oracle = noise.gumbel(torch.tensor(words)).numpy(), noise.reference_gumbel(np.array(words, np.uint32))
    assert np.array_equal(ours.view(np.int32), oracle.view(np.int32))


def test_every_purpose_has_the_number_that_seeded_outputs_were_drawn_with():
    assert {purpose.name: int(purpose) for purpose in Purpose} == {
        "TARGET": 0,
        "DRAFT": 1,
        "ACCEPT": 2,
        "RESIDUAL": 3,
        "COIN": 4,
    }
    assert key(7) == key(7, 0)


def test_coins_are_the_first_words_of_their_purpose():
    """Against the oracle, several draws at a time."""
    keys, positions = [key(seed, seed) for seed in range(5)], [0, 1, 7, 2**31, 2**32 - 1]
    for purpose in Purpose:
        ours = coins(torch.tensor(keys), torch.tensor(positions), purpose)
        counter = np.array([[position, 0, purpose, 0] for position in positions], np.uint32)
        words = noise.reference_philox(counter, np.array(keys, np.uint32))[:, 0]
        assert ours.dtype == torch.float64
        assert ours.tolist() == [int(word) / 2**32 for word in words]


def test_all_of_the_vocabulary_is_the_chosen_ids():
    keys, positions = torch.tensor([key(1, 0), key(1, 1)]), torch.tensor([5, 9])
    ids = torch.tensor([[0, 3, 4, 50_256], [7, 7, 1, 50_255]])
    everything = noise.gumbel_at(keys, positions, 50_257)
    assert torch.equal(noise.gumbel_at(keys, positions, ids), everything.gather(-1, ids))


def test_seed_child_position_and_purpose_each_change_the_noise():
    def at(seed=1, child=0, position=2, purpose=Purpose.TARGET):
        return noise.gumbel_at(torch.tensor([key(seed, child)]), torch.tensor([position]), 1000, purpose)

    others = [at(seed=2), at(child=1), at(position=3), *(at(purpose=p) for p in Purpose if p != Purpose.TARGET)]
    for other in others:
        assert (other == at()).sum() < 5
        assert abs(np.corrcoef(other.numpy(), at().numpy())[0, 1]) < 0.15
    assert torch.equal(at(), at())


def test_the_values_are_gumbel():
    """Mean and variance on four million draws, and the whole shape on 200,000."""
    keys = torch.tensor([key(11, child) for child in range(8)])
    values = noise.gumbel_at(keys, torch.arange(8), 500_000).numpy().astype(np.float64)
    assert abs(values.mean() - 0.5772157) < 5 * math.sqrt(math.pi**2 / 6 / values.size)
    assert abs(values.var() - math.pi**2 / 6) < 0.01
    some = values.reshape(-1)[:200_000]
    assert stats.kstest(some, "gumbel_r").pvalue > 1e-4
    assert stats.kstest(some * 1.03, "gumbel_r").pvalue < 1e-4  # the test has power


def test_the_logarithms_are_accurate():
    random = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32)
    words = np.concatenate([random, np.arange(2000, dtype=np.uint32), 2**32 - 1 - np.arange(2000, dtype=np.uint32)])
    exact = -np.log(-np.log1p(-(words + 0.5) / 2**32))
    assert np.abs(noise.reference_gumbel(words) - exact).max() <= 1e-6


def test_the_gumbel_range_equals_the_assumed_reach():
    """Values fall as words grow, so the first and last word bound them all."""
    top, bottom = noise.gumbel(torch.tensor([0, 2**32 - 1])).tolist()
    assert bottom > GUMBEL_MIN - 0.01
    assert top < GUMBEL_MAX + 0.01
    assert top - bottom < REACH
    assert (bottom, top) == pytest.approx((GUMBEL_MIN, GUMBEL_MAX), abs=0.01)  # and no wider: a wide reach is slow
    assert pytest.approx(GUMBEL_MAX - GUMBEL_MIN) == REACH
    steps = noise.gumbel(torch.arange(0, 2**32, 65537)).diff()
    assert steps.max() <= 0
