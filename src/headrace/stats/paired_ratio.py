"""Statistics of measurements: ratios of pairs with an interval, perplexity with its standard error, similarity of texts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_high, median_low

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the pairs' ratios, and an interval that contains the true median with probability `confidence`."""

    median: float
    low: float
    high: float
    confidence: float


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ours divided by theirs, pair by pair. The interval uses order statistics and assumes no distribution.

    The median of an even number of ratios is the geometric mean of the middle two: 1 if one build is ahead in half of the
    pairs by the factor by which the other is ahead in the rest.
    """
    ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    rank, confidence = _rank(len(ratios))
    middle = math.sqrt(median_low(ratios) * median_high(ratios)) if len(ratios) % 2 == 0 else median(ratios)
    return Ratio(middle, ratios[rank], ratios[-1 - rank], confidence)


def _rank(count: int) -> tuple[int, float]:
    """Number of sorted values to leave out at each end, and the confidence of the rest.

    It is the largest number that keeps CONFIDENCE; 0 if there are too few values for it. The median lies outside the sorted
    values [k .. n-1-k] if at most k of n values lie on one side of it, a binomial tail with p = 1/2.
    """
    tail, best = 0.0, (0, max(0.0, 1 - 2 * 0.5**count))
    for k in range((count - 1) // 2 + 1):
        tail += math.comb(count, k) * 0.5**count
        if 1 - 2 * tail < CONFIDENCE:
            break
        best = (k, 1 - 2 * tail)
    return best


def rouge_l(candidate: Sequence[int], reference: Sequence[int]) -> float:
    """ROUGE-L F1: length of the longest common subsequence over the mean of both lengths; 1 if both are empty.

    Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", ACL 2004.
    """
    if not candidate and not reference:
        return 1.0
    row = [0] * (len(reference) + 1)
    for token in candidate:
        diagonal = 0
        for column, other in enumerate(reference, 1):
            diagonal, row[column] = row[column], diagonal + 1 if token == other else max(row[column], row[column - 1])
    return 2 * row[-1] / (len(candidate) + len(reference))


def perplexity(logprobs: Sequence[float]) -> tuple[float, float | None]:
    """exp of the mean negative log-likelihood, and its standard error (delta method, tokens taken as independent).

    logprobs: natural logarithms, at least one. The error is None for one token; the perplexity is inf if exp overflows.
    """
    mean = math.fsum(logprobs) / len(logprobs)
    value = math.exp(-mean) if mean > -700 else math.inf
    if len(logprobs) < 2:
        return value, None
    variance = math.fsum((logprob - mean) ** 2 for logprob in logprobs) / (len(logprobs) - 1)
    return value, value * math.sqrt(variance / len(logprobs))


def perplexity_of_texts(logprobs: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Perplexity of all tokens, and its standard error over texts, whose tokens depend on each other (ratio estimator).

    logprobs: natural logarithms of each text's tokens, at least one. The error is None for one text.
    """
    value, _ = perplexity([one for text in logprobs for one in text])
    texts = len(logprobs)
    if texts < 2 or math.isinf(value):
        return value, None
    mean, tokens = -math.log(value), sum(map(len, logprobs))
    squares = math.fsum((math.fsum(text) - len(text) * mean) ** 2 for text in logprobs)
    return value, value * math.sqrt(squares * texts / (texts - 1)) / tokens


def perplexity_ratio(own: Sequence[Sequence[float]], first: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """Perplexity divided by that of another model on the same tokens, and its standard error over texts, paired.

    own, first: natural logarithms of the same tokens, by text. The error is None for one text.
    """
    less = [[mine - other for mine, other in zip(*pair, strict=True)] for pair in zip(own, first, strict=True)]
    return perplexity_of_texts(less)


def mcnemar(lost: int, gained: int) -> float:
    """P-value of the hypothesis that a question is as likely lost as gained: exact, two-sided (McNemar, 1947)."""
    fewer, count = min(lost, gained), lost + gained
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(fewer + 1)) / 2**count)


def tokens_for_error(count: int, share: float, target: float) -> int:
    """Tokens that bring a relative error of `share`, measured on `count` tokens, down to `target`; in steps of 100.

    The error falls with the square root of the number of tokens.
    """
    return math.ceil(count * (share / target) ** 2 / 100) * 100
