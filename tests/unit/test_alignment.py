"""Alignment of tokens: median, warping and the whole of it against slow references; words and their punctuation."""

from typing import Any

import numpy as np
import pytest

from headrace.audio.transcript import Segment
from headrace.audio.words import Durations, Timing, add_words, merge_punctuation, shorten_at_sentences, split_words
from headrace.data.plan import Align
from headrace.runner.alignment import align, first_positions, normalised, smoothed


def slow_starts(cost: np.ndarray) -> list[int]:
    """The same path, cell by cell."""
    tokens, positions = cost.shape
    total = np.full((tokens + 1, positions + 1), np.inf, np.float32)
    total[0, 0] = 0
    moves: dict[tuple[int, int], tuple[int, int]] = {}
    for j in range(1, positions + 1):
        for i in range(1, tokens + 1):
            both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
            if both < down and both < right:
                least, moves[i, j] = both, (1, 1)
            elif down < both and down < right:
                least, moves[i, j] = down, (1, 0)
            else:
                least, moves[i, j] = right, (0, 1)
            total[i, j] = cost[i - 1, j - 1] + least
    starts = [0] * tokens
    i, j = tokens, positions
    while i and j:
        starts[i - 1] = j - 1
        di, dj = moves[i, j]
        i, j = i - di, j - dj
    return starts


@pytest.mark.parametrize(("tokens", "positions"), [(1, 1), (1, 9), (6, 6), (9, 4), (12, 60)])
def test_the_path_is_the_cheapest(tokens: int, positions: int) -> None:
    rng = np.random.default_rng(tokens)
    for _ in range(20):
        cost = rng.standard_normal((tokens, positions))
        assert first_positions(cost).tolist() == slow_starts(cost)
    ties = np.zeros((tokens, positions))
    assert first_positions(ties).tolist() == slow_starts(ties)


def test_steps_of_a_staircase_are_found() -> None:
    cost = np.ones((4, 40))
    for token, start in enumerate((0, 7, 19, 33)):
        cost[token, start : (7, 19, 33, 40)[token]] = -1
    assert first_positions(cost).tolist() == [0, 7, 19, 33]
    assert first_positions(np.roll(cost, 1, axis=1)).tolist() != [0, 7, 19, 33]


@pytest.mark.parametrize("positions", [3, 4, 30])
def test_weights_are_smoothed_by_the_median(positions: int) -> None:
    weights = np.random.default_rng(0).standard_normal((5, positions)).astype(np.float32)
    if positions == 3:
        assert smoothed(weights) is weights
        return
    padded = np.pad(weights, ((0, 0), (3, 3)), mode="reflect")
    expected = np.median(np.lib.stride_tricks.sliding_window_view(padded, 7, axis=1), axis=2)
    assert np.array_equal(smoothed(weights), expected)


def test_weights_are_normalised_over_the_tokens() -> None:
    scaled = normalised(np.random.default_rng(0).standard_normal((5, 30)).astype(np.float32) * 3)
    assert np.abs(scaled.mean(axis=0)).max() < 1e-5
    assert scaled.std(axis=0) == pytest.approx(1.0, abs=1e-4)
    assert not normalised(np.zeros((5, 1), np.float32)).any()  # one position: no difference


def test_tokens_are_aligned_by_the_named_heads() -> None:
    """Head (1, 0) follows the source, head (0, 1) runs backwards."""
    units = np.eye(5, 32, dtype=np.float32)
    keys = np.stack([np.repeat(units, 8, axis=0), np.repeat(units, 8, axis=0)[::-1]], axis=1)
    positions, rows = len(keys), np.tile(units[[0, 0, 1, 2, 3, 4]], 2) * 60

    def starts(*heads: tuple[int, int]) -> list[int]:
        want = Align(heads, 1, positions)
        return list(align(want, {"cross.0": rows, "cross.1": rows}, lambda layer: keys).starts)

    right = starts((1, 0))
    assert right == pytest.approx([0, 8, 16, 24], abs=1)
    assert starts((0, 1)) != right


def decode(tokens: Any) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def words(text: str, language: str = "en") -> list[str]:
    return [one.word for one in split_words(list(text.encode()), decode, language)]


def test_texts_are_split_into_words() -> None:
    assert words(" Mill, the (river)") == [" Mill", ",", " the", " ", "(river", ")"]
    split = split_words(list(" né 水".encode()), decode, "en")
    assert [one.word for one in split] == [" né", " 水"]
    assert [token for one in split for token in one.tokens] == list(" né 水".encode())
    assert words("水車", "ja") == ["水", "車"]
    broken = split_words([*b" a", 0xE6, 0xB0], decode, "en")  # a character that is cut
    assert [token for one in broken for token in one.tokens] == [*b" a", 0xE6, 0xB0]


def timings(*words: tuple[str, float, float]) -> list[Timing]:
    return [Timing(word, [at], start, end, 1.0) for at, (word, start, end) in enumerate(words)]


def test_punctuation_goes_with_its_word() -> None:
    made = timings((" Mill", 0, 1), (",", 1, 1.2), (' "', 1.2, 1.3), ("wheel", 1.3, 2), (".", 2, 2.1), ('"', 2.1, 2.2))
    merge_punctuation(made)
    assert [one.word for one in made if one.word] == [" Mill,", ' "wheel."']
    assert sum(len(one.tokens) for one in made) == 6


def test_long_words_are_cut_at_sentences_and_segments() -> None:
    made = timings((" a", 0, 0.2), (".", 0.2, 3.0), (" b", 3.0, 3.2), (" c", 3.2, 3.4))
    durations = Durations.of(made)
    assert durations.median == pytest.approx(0.2)
    shorten_at_sentences(made, durations)
    assert made[1].end == pytest.approx(0.6)
    merge_punctuation(made)
    segments = [Segment(0, 10.0, 12.9, " a."), Segment(1, 13.0, 13.4, " b c")]
    spoken = add_words(segments, [2, 2], made, durations, 10.0, 0.0)
    assert [[word.word for word in one.words or ()] for one in segments] == [[" a."], [" b", " c"]]
    assert (segments[0].start, segments[0].end) == (10.0, 10.2)
    assert spoken == segments[1].end == 13.4


def test_the_times_of_a_segment_win_over_words_that_are_too_long() -> None:
    made = timings((" a", 0.0, 2.0), (" b", 2.0, 2.2), (" c", 2.2, 4.0))
    segment = Segment(0, 1.0, 2.9, " a b c")
    add_words([segment], [3], made, Durations(0.3, 0.6), 0.0, 3.0)
    assert segment.words
    assert (segment.words[0].start, segment.words[-1].end) == (pytest.approx(1.0), pytest.approx(2.9))
    assert (segment.start, segment.end) == (1.0, 2.9)
    nothing = Segment(0, 1.0, 2.0, " a")
    assert add_words([nothing], [1], [], Durations(0.0, 0.0), 0.0, 0.5) == 0.5
    assert nothing.words == []
