"""Word error rate of transcripts, with bootstrap intervals over the recordings."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

REDRAWS = 2000


@dataclass(frozen=True, slots=True)
class Words:
    """One recording: word edits between its reference and its transcript, and the words of the reference."""

    edits: int
    length: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Edits per word of reference, and an interval that holds 95 % of the redraws."""

    rate: float
    low: float
    high: float


def compare(reference: Sequence[str], transcript: Sequence[str]) -> Words:
    """Least number of words that are replaced, left out or inserted (Levenshtein)."""
    row = list(range(len(transcript) + 1))
    for i, word in enumerate(reference, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(transcript, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return Words(row[-1], len(reference))


def error_rate(recordings: Sequence[Words], seed: int = 0) -> Rate:
    """Raises ValueError without recordings or words."""
    edits, lengths = _counts(recordings)
    drawn = _draws(len(recordings), seed)
    rates = edits[drawn].sum(1) / lengths[drawn].sum(1)
    low, high = np.quantile(rates, [0.025, 0.975])
    return Rate(float(edits.sum() / lengths.sum()), float(low), float(high))


def rate_difference(ours: Sequence[Words], theirs: Sequence[Words], seed: int = 0) -> Rate:
    """Our rate minus theirs on the same recordings, drawn in pairs. Raises ValueError for other numbers of recordings."""
    mine, lengths = _counts(ours)
    other, same = _counts(theirs)
    if len(mine) != len(other) or (lengths != same).any():
        raise ValueError("both engines transcribe the same recordings")
    drawn = _draws(len(mine), seed)
    differences = (mine - other)[drawn].sum(1) / lengths[drawn].sum(1)
    low, high = np.quantile(differences, [0.025, 0.975])
    return Rate(float((mine - other).sum() / lengths.sum()), float(low), float(high))


def _counts(recordings: Sequence[Words]) -> tuple[np.ndarray, np.ndarray]:
    if not recordings or min(one.length for one in recordings) < 1:
        raise ValueError("a word error rate needs a recording, and a word in each reference")
    return np.array([one.edits for one in recordings]), np.array([one.length for one in recordings])


def _draws(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, (REDRAWS, count))
