"""Biases, bans and the three penalties: three different things (W47)."""

import numpy as np
import pytest
import torch

from headrace.data.params import SamplingParams
from headrace.ops import penalties
from headrace.ops.penalties import TokenCounts
from tests.ops.sampling_reference import ngram_banned

NEVER = float("-inf")


def counted(vocab, prompt, *outputs):
    """seen [r, V] and counts [r, V] of one row for each output."""
    rows = [TokenCounts(vocab, prompt, output) for output in outputs]
    return torch.stack([row.seen for row in rows]), torch.stack([row.output for row in rows])


def test_W47_repetition_counts_once_frequency_each_time_presence_once_in_the_output():
    z = torch.tensor([[1.0, 2.0, 3.0]]).expand(2, -1)
    seen, counts = counted(3, [0], [1], [1] * 5)

    repetition = penalties.repetition(z, seen, 2.0)
    assert repetition[0].tolist() == repetition[1].tolist() == [0.5, 1.0, 3.0]  # the prompt's token too; 1 or 5 times alike
    frequency = penalties.frequency_presence(z, counts, 0.5, 0.0)
    assert frequency[:, 1].tolist() == [1.5, -0.5]  # linear in the count
    assert frequency[:, 0].tolist() == [1.0, 1.0]  # the prompt does not count
    presence = penalties.frequency_presence(z, counts, 0.0, 0.5)
    assert presence.tolist() == [[1.0, 1.5, 3.0]] * 2

    assert not torch.equal(repetition, frequency)
    assert not torch.equal(repetition, presence)
    assert not torch.equal(frequency[1], presence[1])


def test_repetition_lowers_negative_logits_too():
    """CTRL as printed divides always, which would raise them."""
    z = torch.tensor([[-1.0, 1.0, 0.0, NEVER]])
    out = penalties.repetition(z, torch.ones(1, 4, dtype=torch.bool), 1.2)
    assert out[0, 0] == pytest.approx(-1.2)
    assert out[0, 1] == pytest.approx(1 / 1.2)
    assert out[0, 2:].tolist() == [0.0, NEVER]


def test_repetition_is_not_invariant_to_a_shift():
    z = torch.tensor([[1.0, 1.0]])
    seen = torch.tensor([[True, False]])
    gap = [float(out[0, 0] - out[0, 1]) for out in (penalties.repetition(z + shift, seen, 2.0) for shift in (0.0, 10.0))]
    assert gap[0] != gap[1]


def test_neutral_penalties_leave_every_bit():
    z = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (2, 100)).astype(np.float32))
    z[0, 0], z[1, 1] = -0.0, NEVER
    seen, counts = counted(100, range(50), range(20, 60), [3] * 9)
    for out in (
        penalties.repetition(z, seen, 1.0),
        penalties.frequency_presence(z, counts, 0.0, 0.0),
        penalties.bias(z, [None, {}]),
        penalties.allow(z, [None, None]),
        penalties.ban(z, [[], []]),
    ):
        assert torch.equal(out.view(torch.int32), z.view(torch.int32))


def test_each_row_has_its_own_setting_and_z_stays():
    z = torch.tensor([[1.0, 2.0]]).repeat(3, 1)
    seen, counts = counted(2, [], [0], [0, 0], [])
    assert penalties.repetition(z, seen, torch.tensor([2.0, 1.0, 4.0])).tolist() == [[0.5, 2.0], [1.0, 2.0], [1.0, 2.0]]
    out = penalties.frequency_presence(z, counts, torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.0, 0.25, 1.0]))
    assert out.tolist() == [[0.0, 2.0], [-1.25, 2.0], [1.0, 2.0]]
    assert penalties.bias(z, [{0: 3.0}, None, {1: -100.0}]).tolist() == [[4.0, 2.0], [1.0, 2.0], [1.0, -98.0]]
    assert penalties.allow(z, [(1,), None, (0, 1)]).tolist() == [[NEVER, 2.0], [1.0, 2.0], [1.0, 2.0]]
    assert penalties.ban(z, [{1}, [], [0, 1]]).tolist() == [[1.0, NEVER], [1.0, 2.0], [NEVER, NEVER]]
    assert z.tolist() == [[1.0, 2.0]] * 3


def test_no_repeat_ngram_equals_brute_force():
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(400):
        history = rng.integers(0, 4, rng.integers(0, 25)).tolist()
        for n in (1, 2, 3, 5):
            banned = penalties.repeated_ngrams(history, n)
            assert banned == ngram_banned(history, n)
            found += bool(banned)
    assert found > 300


def test_only_the_last_token_of_a_bad_word_is_banned():
    words = [(7,), (1, 2), (1, 2, 3)]
    assert penalties.completed_words([], words) == {7}
    assert penalties.completed_words([5, 1], words) == {7, 2}
    assert penalties.completed_words([1, 2], words) == {7, 3}
    assert penalties.completed_words([2, 1], words) == {7, 2}
    assert penalties.completed_words([1], [(1, 1, 4)]) == set()
    assert penalties.completed_words([1, 1], [(1, 1, 4)]) == {4}


def test_counts_grow_fork_and_reach_ahead():
    counts = TokenCounts(10, prompt=[1, 2], output=[3])
    counts.extend([3, 4])
    assert counts.seen.nonzero()[:, 0].tolist() == [1, 2, 3, 4]
    assert counts.output.tolist() == [0, 0, 0, 2, 1, 0, 0, 0, 0, 0]
    assert counts.length == 3

    ahead = counts.plus([9, 3])  # along a draft
    assert ahead.output[3] == 3
    assert ahead.seen[9]
    assert ahead.length == 5
    assert counts.output[3] == 2
    assert not counts.seen[9]
    assert counts.plus([]) is counts

    fork = counts.copy()
    fork.extend([5])
    assert not counts.seen[5]


@pytest.mark.parametrize("token", [-1, 10])
def test_counts_refuse_an_id_outside_the_vocabulary(token):
    with pytest.raises(ValueError, match="outside the vocabulary of 10"):
        TokenCounts(10, prompt=[token])


def test_lists_of_another_length_than_the_rows_are_refused():
    z = torch.zeros(2, 3)
    for op, each in ((penalties.bias, {0: 1.0}), (penalties.allow, [0]), (penalties.ban, [0])):
        for count in (1, 3):
            with pytest.raises(ValueError, match="argument 2 is"):
                op(z, [each] * count)


def test_nothing_allowed_is_nothing_possible():
    assert penalties.allow(torch.zeros(1, 3), [[]]).tolist() == [[NEVER] * 3]


def test_a_bias_has_the_precision_of_the_logits():
    assert penalties.bias(torch.zeros(1, 2, dtype=torch.float64), [{1: 0.1}]).tolist() == [[0.0, 0.1]]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100])
def test_a_mask_has_a_bit_for_each_token_and_whole_words(vocab):
    rng = np.random.default_rng(vocab)
    allowed = rng.integers(0, 2, (3, vocab)).astype(bool)
    words = -(-vocab // 32)
    rows = np.zeros((3, words * 32), dtype=bool)
    rows[:, :vocab] = allowed
    rows[:, vocab:] = True  # bits of no token say nothing
    masks = [np.packbits(row, bitorder="little").tobytes() for row in rows]
    z = torch.from_numpy(rng.normal(size=(3, vocab)).astype(np.float32))
    assert torch.equal(penalties.mask(z, masks), z.masked_fill(torch.from_numpy(~allowed), NEVER))
    penalties.check_mask(masks[0], vocab)
    for wrong in (b"", masks[0][:-1], masks[0] + bytes(1), masks[0] + bytes(4)):
        with pytest.raises(ValueError, match="gave no mask"):
            penalties.check_mask(wrong, vocab)


def test_dry_counts_up_to_64_tokens():
    """A base so near 1 that the dearest cost is far: each token of the match counts once, and the 65th no more."""
    params = SamplingParams(dry_multiplier=1.0, dry_base=1.01, dry_allowed_length=1)
    for length, counted in ((63, 63), (64, 64), (65, 64), (80, 64)):
        text = list(range(length))
        assert penalties.dry([*text, 500, 600, *text], params) == {500: pytest.approx(1.01 ** (counted - 1))}
