"""How much a text repeats itself, on its tokens."""

from collections.abc import Iterable, Sequence

Tokens = Sequence[int]


def ngrams(tokens: Tokens, n: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def rep(tokens: Tokens, n: int = 4) -> float:
    """The share of n-grams that stand earlier in the same text (seq-rep-n of Welleck et al., 2020); 0 for short texts."""
    grams = ngrams(tokens, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(texts: Iterable[Tokens], n: int = 4) -> float:
    """Different n-grams over all n-grams of all texts together (Li et al., 2016); 1 where there is none."""
    grams = [gram for tokens in texts for gram in ngrams(tokens, n)]
    return len(set(grams)) / len(grams) if grams else 1.0
