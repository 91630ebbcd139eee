"""The attacks of benchmarks.slowdown, on a classifier made by hand: tokens say how sure its exits are."""

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.slowdown import Rule, attack, capped, changed_at_random, outcome, slower, wronger

EXITS, RULE = 5, ("patience", 1.0)
# Token 7 makes an exit contradict the one before it, token 9 speaks for class 1; the others are neutral words.
DOUBT, OTHER = 7, 9
TEXT = [1, 2, 3, 4, 5]


def score(texts: Sequence[list[int]]) -> np.ndarray:
    """Probabilities [exits, texts, 2]: n odd exits waver if a text has n tokens 7, and 9 decides the class."""
    probs = np.empty((EXITS, len(texts), 2))
    for at, text in enumerate(texts):
        first, wavering = 0.8 - 0.25 * text.count(OTHER), text.count(DOUBT)
        for exit in range(EXITS):
            share = 1 - first if exit % 2 and exit < 2 * wavering else first
            probs[exit, at] = share, 1 - share
    return probs


def near(token: int) -> list[int]:
    return [6, DOUBT, OTHER] if token < 6 else []


def under(text: list[int], rule: Rule) -> tuple[int, int]:
    found = outcome(score([text]), rule)
    return int(found.exits[0]), int(found.classes[0])


def test_a_slow_text_runs_deeper_and_a_cap_holds() -> None:
    """Control: as many random changes run less deep on average."""
    slow = attack(TEXT, 0, RULE, slower, score, near, 3)
    assert under(TEXT, RULE) == (1, 0)
    assert (slow.count(DOUBT), under(slow, RULE)[0]) == (2, 4)
    for cap in (2, 3, 4):
        assert under(slow, capped(RULE, EXITS, cap))[0] == cap - 1
    rng = np.random.default_rng(0)
    drawn = [under(changed_at_random(TEXT, 3, near, rng), RULE)[0] for _ in range(200)]
    assert np.mean(drawn) < 3


def test_an_attack_changes_no_word_twice_and_stops_without_gain() -> None:
    wrong = attack(TEXT, 0, RULE, wronger, score, near, 2)
    assert sum(old != new for old, new in zip(TEXT, wrong, strict=True)) == 2
    assert under(wrong, RULE)[1] == 1
    assert attack([8, 8], 0, RULE, wronger, score, near, 2) == [8, 8]
    assert attack(TEXT, 0, ("", 0.0), slower, score, lambda token: [6], 2) == TEXT  # nothing is less sure by that


def test_a_cap_needs_a_threshold_that_all_texts_pass() -> None:
    assert capped(("max_prob", 0.9), 6, 3) == ("max_prob", (0.9, 0.9, 0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="entropy has no threshold 0"):
        capped(("entropy", 0.1), 6, 3)
