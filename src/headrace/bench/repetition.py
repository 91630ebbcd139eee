"""Repetition of a text, from the n-grams of its tokens."""

from collections.abc import Iterable, Sequence

Tokens = Sequence[int]


def ngrams(tokens: Tokens, n: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def rep(tokens: Tokens, n: int = 4) -> float:
    """Share of n-grams that occur earlier in the same text, 0 for short texts (seq-rep-n of Welleck et al., 2020)."""
    grams = ngrams(tokens, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(texts: Iterable[Tokens], n: int = 4) -> float:
    """Distinct n-grams divided by all n-grams of all texts together, 1 if there are none (Li et al., 2016)."""
    grams = [gram for tokens in texts for gram in ngrams(tokens, n)]
    return len(set(grams)) / len(grams) if grams else 1.0
