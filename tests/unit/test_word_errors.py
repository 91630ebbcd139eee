import pytest

from benchmarks.word_errors import Words, compare, error_rate, rate_difference


@pytest.mark.parametrize(
    ("reference", "transcript", "edits"),
    [
        ("a b c", "a b c", 0),
        ("a b c", "a x c", 1),
        ("a b c", "a c", 1),
        ("a b c", "a b b c d", 2),
        ("a b c", "", 3),
        ("a b", "c a b", 1),
    ],
)
def test_edits_are_the_least(reference: str, transcript: str, edits: int) -> None:
    assert compare(reference.split(), transcript.split()) == Words(edits, len(reference.split()))


def test_the_rate_counts_words_not_recordings() -> None:
    rate = error_rate([Words(1, 1), Words(0, 9)])
    assert rate.rate == pytest.approx(0.1)
    assert rate.low == 0.0 <= rate.rate <= rate.high == 1.0


def test_a_difference_is_taken_in_pairs() -> None:
    ours = [Words(n, 10) for n in (1, 5, 9, 2)]
    theirs = [Words(n + 1, 10) for n in (1, 5, 9, 2)]
    difference = rate_difference(ours, theirs)
    assert (difference.rate, difference.low, difference.high) == pytest.approx((-0.1, -0.1, -0.1))
    apart = error_rate(ours)
    assert apart.high - apart.low > 0.1, "the control: each alone has a wide interval"


def test_wrong_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="needs a recording"):
        error_rate([])
    with pytest.raises(ValueError, match="a word in each reference"):
        error_rate([Words(0, 0)])
    with pytest.raises(ValueError, match="the same recordings"):
        rate_difference([Words(0, 3)], [Words(0, 4)])
