"""Perplexity with its standard error, and the number of tokens that a narrower error needs."""

import math
from collections.abc import Sequence


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


def tokens_for_error(count: int, share: float, target: float) -> int:
    """Tokens that bring a relative error of `share`, measured on `count` tokens, down to `target`; in steps of 100.

    The error falls with the square root of the number of tokens.
    """
    return math.ceil(count * (share / target) ** 2 / 100) * 100
