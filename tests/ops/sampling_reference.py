"""Sampling done the slow and obvious way, in numpy float64: what the tests hold the real one to."""

import numpy as np
import pytest
from scipy import stats

ALPHA = 1e-4
N = 200_000
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)))
# sixteen tokens whose rarest still comes often enough at temperature 0.5
LOGITS = np.float32([2.0, -0.5, 1.0, 0.3, 1.9, 0.0, -0.2, 1.4, 0.7, -0.4, 0.9, 1.1, 0.2, -0.1, 0.5, 1.6])


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def edited(logits, params, prompt, output, stop_ids=()) -> np.ndarray:
    """Logits after bias, masks and penalties, up to temperature."""
    z = np.array(logits, dtype=np.float64)
    history = list(prompt) + list(output)
    for token, value in (params.logit_bias or {}).items():
        z[token] += value
    if params.allowed_token_ids is not None:
        z[[t for t in range(len(z)) if t not in params.allowed_token_ids]] = -np.inf
    for word in params.bad_words:
        if len(history) >= len(word) - 1 and history[len(history) - len(word) + 1 :] == list(word[:-1]):
            z[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        z[list(stop_ids)] = -np.inf
    z[list(ngram_banned(history, params.no_repeat_ngram))] = -np.inf
    for token in set(history):
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in set(output):
        z[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, cost in dry_costs(history, params).items():
        z[token] -= cost
    return z


def dry_costs(history, params) -> dict[int, float]:
    """Every token, every length: do the last n tokens, then this one, stand earlier in the history?"""
    history = history[-params.dry_range :]
    costs = {}
    for token in set(history) if params.dry_multiplier else ():
        for n in range(1, min(64, len(history)) + 1):
            tail = history[-n:]
            if token in params.dry_breakers or set(tail) & set(params.dry_breakers):
                break
            if (
                any(history[i : i + n + 1] == [*tail, token] for i in range(len(history) - n))
                and n >= params.dry_allowed_length
            ):
                costs[token] = min(params.dry_multiplier * params.dry_base ** (n - params.dry_allowed_length), 1e4)
    return costs


def ngram_banned(history, n) -> set[int]:
    """Try every token: is the n-gram it would end already there?"""
    if n == 0 or len(history) < n:
        return set()
    grams = {tuple(history[i : i + n]) for i in range(len(history) - n + 1)}
    return {gram[-1] for gram in grams if gram == (*history[len(history) - n + 1 :], gram[-1])}


def filtered(z, params) -> np.ndarray:
    """Logits after temperature and the filters, -inf outside the kept set."""
    z = z / params.temperature
    if params.top_n_sigma:
        z = keep(z, np.flatnonzero(z >= z.max() - params.top_n_sigma * z[z > -np.inf].std()))
    if params.top_k:
        z = keep(z, np.argsort(-z, kind="stable")[: params.top_k])
    if params.typical_p < 1:
        p = softmax(z)
        log = np.log(p, where=p > 0, out=np.full_like(p, -np.inf))
        entropy = -np.sum(p[p > 0] * log[p > 0])
        z = keep(z, prefix(np.argsort(np.abs(-log - entropy), kind="stable"), p, params.typical_p))
    if params.top_p < 1:
        p = softmax(z)
        z = keep(z, prefix(np.argsort(-z, kind="stable"), p, params.top_p))
    if params.min_p > 0:
        p = softmax(z)
        z = keep(z, np.flatnonzero(p >= params.min_p * p.max()))
    return z


def without_top(z, threshold) -> np.ndarray:
    """XTC when its coin says so: of the tokens this likely the least likely stays."""
    p = softmax(z)
    falling = np.argsort(-z, kind="stable")
    top = [token for token in falling if p[token] >= threshold]
    return keep(z, [token for token in falling if token not in top[:-1]])


def prefix(order, p, goal) -> np.ndarray:
    """The shortest beginning of `order` whose probabilities reach the goal."""
    total = 0.0
    for n, token in enumerate(order):
        total += p[token]
        if total >= goal:
            return order[: n + 1]
    return order


def keep(z, ids) -> np.ndarray:
    out = np.full_like(z, -np.inf)
    out[ids] = z[ids]
    return out


def distribution(logits, params, prompt=(), output=(), stop_ids=()) -> np.ndarray:
    """The probabilities a token is drawn with (temperature > 0)."""
    return softmax(filtered(edited(logits, params, list(prompt), list(output), stop_ids), params))


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts against probabilities; 0 where something came that cannot."""
    possible = expected > 0
    if observed[~possible].any():
        return 0.0
    cells = expected[possible] * observed.sum()
    assert cells.min() >= 5, "too few expected in a cell"
    if len(cells) == 1:
        return 1.0
    return float(stats.chisquare(observed[possible], cells).pvalue)
