"""The rejection rule on the native core: what torch's rule says, and the target's distribution; mistakes are seen."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from headrace import core
from headrace.backends.native.live import sample_params
from headrace.data.params import SamplingParams
from headrace.ops.keys import Purpose, key
from headrace.ops.processing import RowSpec
from headrace.ops.rejection import draw_draft, verify
from tests.ulps import rounded_once

ALPHA = 1e-4
PROMPT = [3, 1, 4, 1, 5]
Chain = tuple[list[int], np.ndarray]

SETTINGS = {
    "plain": SamplingParams(temperature=0.8),
    "filters": SamplingParams(temperature=1.1, top_p=0.9, top_k=40, min_p=0.01),
    "typical": SamplingParams(temperature=0.9, typical_p=0.9, xtc_probability=0.5, xtc_threshold=0.1),
    "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={7: 2.0}, min_tokens=2),
}


def spec_of(params: SamplingParams, path: list[int], seed: int) -> RowSpec:
    return RowSpec(params, [key(seed)], PROMPT, len(PROMPT), path, stop_ids=[2], purpose=Purpose.DRAFT)


@pytest.mark.parametrize("block", [False, True], ids=["tokens", "block"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("count", [36, pytest.param(120, marks=pytest.mark.slow)])
def test_decisions_equal_those_of_torch(count: int, name: str, block: bool) -> None:
    """Drafted tokens with their q, paths, tokens and log-probabilities: chains of 1 to 4, drawn or chosen."""
    size, rng = 300, np.random.default_rng(len(name))
    params = SETTINGS[name].replace(verification="block" if block else "rejection")
    native, history = core.module().Sampler(size), core.module().History(PROMPT)
    given = sample_params(params, [2])
    lengths = []
    for seed in range(count):
        gamma, drawn = 1 + seed % 4, seed % 3 > 0
        p_rows = rng.normal(0, 2.5, (gamma + 1, size)).astype(np.float32)
        chain: list[int] = []
        q: list[bytes] = []
        for at in range(gamma):
            near = (p_rows[at] + rng.normal(0, 0.7, size)).astype(np.float32)
            found = draw_draft(torch.from_numpy(near.copy()), spec_of(params, chain, seed))
            token, shares, error = native.propose(near, given, history, key(seed), chain)
            assert found is not None
            assert not error
            assert token == found[0]
            np.testing.assert_allclose(shares, found[1].numpy(), rtol=1e-5, atol=1e-9)
            chain.append(token)
            q.append(np.array(shares, "<f4").tobytes())
        specs = [spec_of(params, chain[:at], seed) for at in range(gamma + 1)]
        accepted, token = verify(torch.from_numpy(p_rows.copy()), specs, chain, q if drawn else None)
        before, shares = p_rows.copy(), np.array([np.frombuffer(row, "<f4") for row in q], np.float32).reshape(gamma, -1)
        path, reports, error = native.reject(p_rows, given, history, key(seed), chain, shares if drawn else None, block, 2)
        assert not error
        assert path == list(range(accepted))
        assert [report.id for report in reports] == [*chain[:accepted], token]
        np.testing.assert_array_equal(p_rows, before, "rows are put back")
        raw = torch.log_softmax(torch.from_numpy(p_rows).double(), -1)
        for at, report in enumerate(reports):
            assert rounded_once([report.logprob], [float(raw[at, report.id])])
            assert len(report.top_ids) == 2
        lengths.append(accepted)
    assert min(lengths) == 0 < max(lengths)


def test_a_row_that_cannot_be_drawn_from_ends_the_chain() -> None:
    native, history, given = core.module().Sampler(4), core.module().History(PROMPT), sample_params(SETTINGS["plain"], [])
    rows = np.zeros((3, 4), np.float32)
    rows[:2, 1], rows[2] = 60.0, np.nan  # token 1 is certain, and then the rows are broken
    for block in (False, True):
        path, reports, error = native.reject(rows.copy(), given, history, key(0), [1, 1], None, block)
        assert (path, [report.id for report in reports], error) == ([0], [1, 1], "")
        broken = native.reject(rows[[2, 0, 0]].copy(), given, history, key(0), [1, 1], None, block)
        assert broken[0] == broken[1] == []
        assert "logits" in broken[2]


# -- the distribution --------------------------------------------------------------------------------------------------------


def chance(counts: np.ndarray, share: np.ndarray) -> float:
    want, got = share.ravel() * counts.sum(), counts.ravel()
    small = want < 5
    if small.any():
        want, got = np.append(want[~small], want[small].sum()), np.append(got[~small], got[small].sum())
    return float(chi2.sf(((got - want) ** 2 / want).sum(), len(want) - 1))


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z.astype(np.float64) - z.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


class Rounds:
    """Rounds of drafting and verifying, natively. p, q: logits [V + 1, V] after each token, the last row at the beginning."""

    def __init__(self, size: int, seed: int, block: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.size, self.block = size, block
        self.p, self.q = (rng.normal(0, 1, (size + 1, size)).astype(np.float32) for _ in range(2))
        self.native, self.given = core.module().Sampler(size), sample_params(SamplingParams(temperature=1.0), [])
        self.history = core.module().History([0])
        self.seed = 0

    def draft(self, before: int, gamma: int) -> Chain:
        chain: list[int] = []
        rows = []
        self.seed += 1
        for _ in range(gamma):
            row = self.q[chain[-1] if chain else before]
            token, shares, _ = self.native.propose(row.copy(), self.given, self.history, self.key, chain)
            chain.append(token)
            rows.append(shares)
        return chain, np.array(rows, np.float32)

    @property
    def key(self) -> tuple[int, int]:
        return key(self.seed)

    def verify(self, before: int, chain: list[int], q: np.ndarray) -> list[int]:
        """The accepted tokens and the one after them."""
        rows = np.ascontiguousarray(self.p[[before, *chain]])
        _, reports, error = self.native.reject(rows, self.given, self.history, self.key, chain, q, self.block)
        assert not error
        return [report.id for report in reports]

    def from_row(self, row: np.ndarray, place: int) -> int:
        """A token from softmax(row), with the noise of the residual at that place."""
        path, purpose = [0] * place, int(Purpose.RESIDUAL)
        (report,), _ = self.native.draw(row.copy(), self.given, self.history, [self.key], path, purpose=purpose)
        return int(report.id)


Verify = Callable[[Rounds, int, list[int], np.ndarray], list[int]]


def one_position(rule: Verify, n: int = 12_000, block: bool = False, seed: int = 1) -> tuple[float, float, float]:
    """The p-value of first tokens, the share that was accepted, and the overlap of p and q. V = 8."""
    rounds = Rounds(8, seed, block)
    counts, accepted = np.zeros(8), 0
    for _ in range(n):
        chain, q = rounds.draft(8, 1)
        tokens = rule(rounds, 8, chain, q)
        counts[tokens[0]] += 1
        accepted += len(tokens) > 1
    p, q_all = softmax(rounds.p[8]), softmax(rounds.q[8])
    return chance(counts, p), accepted / n, float(np.minimum(p, q_all).sum())


def joint(rule: Verify, n: int = 8_000, block: bool = False, size: int = 4) -> float:
    """The p-value of three tokens together."""
    rounds = Rounds(size, 2, block)
    counts = np.zeros((size, size, size))
    for _ in range(n):
        out: list[int] = []
        while len(out) < 3:
            before = out[-1] if out else size
            out += rule(rounds, before, *rounds.draft(before, 2))
        counts[tuple(out[:3])] += 1
    p = softmax(rounds.p)
    return chance(counts, p[size][:, None, None] * p[:size][:, :, None] * p[:size][None])


@pytest.mark.parametrize("block", [False, True], ids=["tokens", "block"])
def test_one_position_follows_p_and_acceptance_is_the_overlap(block: bool) -> None:
    value, accepted, overlap = one_position(Rounds.verify, block=block)
    assert value > ALPHA
    assert accepted == pytest.approx(overlap, abs=5 * (0.25 / 12_000) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("block", [False, True], ids=["tokens", "block"])
def test_the_distribution_holds_for_400000_rounds(block: bool) -> None:
    value, accepted, overlap = one_position(Rounds.verify, 400_000, block)
    assert value > ALPHA
    assert accepted == pytest.approx(overlap, abs=5 * (0.25 / 400_000) ** 0.5)
    assert joint(Rounds.verify, 60_000, block) > ALPHA


@pytest.mark.parametrize("block", [False, True], ids=["tokens", "block"])
def test_three_tokens_together_follow_p_in_context(block: bool) -> None:
    assert joint(Rounds.verify, block=block) > ALPHA


def test_the_block_rule_accepts_no_fewer() -> None:
    lengths: dict[bool, Any] = {}
    for block in (False, True):
        rounds = Rounds(6, 3, block)
        lengths[block] = np.mean([len(rounds.verify(6, *rounds.draft(6, 4))) for _ in range(6_000)])
    assert lengths[True] > 1.01 * lengths[False]


# -- negative controls -------------------------------------------------------------------------------------------------------


def from_p(rounds: Rounds, before: int, chain: list[int], q: np.ndarray) -> list[int]:
    """The classic mistake: after a rejection the token is drawn from p."""
    tokens = rounds.verify(before, chain, q)
    if len(tokens) <= len(chain):
        tokens[-1] = rounds.from_row(rounds.p[[before, *chain][len(tokens) - 1]], len(tokens) - 1)
    return tokens


def other_q(rounds: Rounds, before: int, chain: list[int], q: np.ndarray) -> list[int]:
    """q as it was before a filter cut it."""
    return rounds.verify(before, chain, (0.7 * q + 0.3 / rounds.size).astype(np.float32))


def wrong_bonus(rounds: Rounds, before: int, chain: list[int], q: np.ndarray) -> list[int]:
    """After a whole chain the row before the last token is drawn from, not the one after it."""
    tokens = rounds.verify(before, chain, q)
    if len(tokens) > len(chain):
        tokens[-1] = rounds.from_row(rounds.p[[before, *chain][len(chain) - 1]], len(chain))
    return tokens


def test_wrong_rejection_rules_fail() -> None:
    assert one_position(from_p)[0] < ALPHA
    assert one_position(other_q)[0] < ALPHA
    assert joint(wrong_bonus) < ALPHA
