"""The rejection rule: the output follows p, whatever q is, and wrong rules fail the same tests."""

from collections.abc import Callable

import pytest
import torch
from scipy.stats import chi2

from headrace.drafting.policy import expected_tokens
from headrace.ops.rejection import verify_block, verify_tokens

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]
RULES = {"tokens": verify_tokens, "block": verify_block}
ALPHA = 1e-4


def uniform(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def gumbel(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return -(-uniform(generator, *shape).clamp(min=1e-300).log()).log()


def distribution(generator: torch.Generator, *shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.softmax(torch.randn(*shape, generator=generator, dtype=torch.float64) * spread, -1)


def chance(counts: torch.Tensor, expected_share: torch.Tensor) -> float:
    """The p-value of counts under a distribution; cells that expect less than 5 are put together."""
    want = expected_share.flatten() * counts.sum()
    got = counts.flatten().double()
    small = want < 5
    if small.any():
        want = torch.cat([want[~small], want[small].sum()[None]])
        got = torch.cat([got[~small], got[small].sum()[None]])
    keep = want > 0
    statistic = float(((got - want)[keep] ** 2 / want[keep]).sum())
    return float(chi2.sf(statistic, int(keep.sum()) - 1))


def one_position(
    rule: Rule, seed: int, n: int = 400_000, size: int = 8
) -> tuple[float, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The p-value of first tokens under p, and acceptance, p, q."""
    generator = torch.Generator().manual_seed(seed)
    p, q = distribution(generator, size), distribution(generator, size)
    drafted = torch.multinomial(q, n, replacement=True, generator=generator)[:, None]
    accepted, token = rule(
        p.expand(n, 2, size), q.expand(n, 1, size), drafted, uniform(generator, n, 1), gumbel(generator, n, 2, size)
    )
    first = torch.where(accepted > 0, drafted[:, 0], token)
    return chance(torch.bincount(first, minlength=size), p), accepted, p, q


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_one_position_follows_p_and_acceptance_is_the_overlap(rule: Rule) -> None:
    for seed in range(3):
        value, accepted, p, q = one_position(rule, seed)
        assert value > ALPHA
        overlap = float(torch.minimum(p, q).sum())
        assert float(accepted.double().mean()) == pytest.approx(overlap, abs=5 * (0.25 / len(accepted)) ** 0.5)


def play(rule: Rule, generator: torch.Generator, p: torch.Tensor, q: torch.Tensor, n: int, gamma: int = 2) -> torch.Tensor:
    """n sequences of three tokens [n, 3]; what comes depends on the token before. p, q [V + 1, V], the last row begins."""
    size = p.shape[1]
    out = torch.full((n, 4 + gamma), size)
    lengths = torch.zeros(n, dtype=torch.int64)
    while int(lengths.min()) < 3:
        rows = (lengths < 3).nonzero()[:, 0]
        before = out[rows].gather(1, (lengths[rows] - 1).clamp(min=0)[:, None])[:, 0]
        before = torch.where(lengths[rows] == 0, size, before)
        drafted, qs, ps = [], [], [p[before]]
        for _ in range(gamma):
            qs.append(q[before])
            before = torch.multinomial(q[before], 1, generator=generator)[:, 0]
            drafted.append(before)
            ps.append(p[before])
        chain = torch.stack(drafted, 1)
        m = len(rows)
        accepted, token = rule(
            torch.stack(ps, 1), torch.stack(qs, 1), chain, uniform(generator, m, gamma), gumbel(generator, m, gamma + 1, size)
        )
        for place in range(gamma + 1):
            value = chain[:, place] if place < gamma else token
            value = torch.where(accepted == place, token, value)
            live = (place <= accepted) & (lengths[rows] + place < out.shape[1])
            at = (lengths[rows] + place).clamp(max=out.shape[1] - 1)
            out[rows[live], at[live]] = value[live]
        lengths[rows] += accepted + 1
    return out[:, :3]


def joint(rule: Rule, seed: int, n: int = 60_000, size: int = 4) -> float:
    generator = torch.Generator().manual_seed(seed)
    p, q = distribution(generator, size + 1, size), distribution(generator, size + 1, size)
    got = play(rule, generator, p, q, n)
    cells = torch.bincount((got * torch.tensor([size**2, size, 1])).sum(1), minlength=size**3)
    want = p[size][:, None, None] * p[:size][:, :, None] * p[:size][None]
    return chance(cells, want)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_three_tokens_together_follow_p_in_context(rule: Rule) -> None:
    assert all(joint(rule, seed) > ALPHA for seed in range(3))


def test_the_block_rule_accepts_no_fewer() -> None:
    """W22: token by token is the best for one token, not for a block."""
    generator = torch.Generator().manual_seed(3)
    n, gamma, size = 100_000, 4, 6
    p, q = distribution(generator, size), distribution(generator, size)
    drafted = torch.multinomial(q, n * gamma, replacement=True, generator=generator).view(n, gamma)
    given = p.expand(n, gamma + 1, size), q.expand(n, gamma, size), drafted
    chance_of = uniform(generator, n, gamma), gumbel(generator, n, gamma + 1, size)
    single, block = (float(rule(*given, *chance_of)[0].double().mean()) for rule in RULES.values())
    assert block > 1.01 * single


# -- negative controls ---------------------------------------------------------------------------------------------------


def from_p(p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, coins: torch.Tensor, noise: torch.Tensor):  # type: ignore[no-untyped-def]
    """The classic mistake: after a rejection the token is drawn from p."""
    accepted, _ = verify_tokens(p, q, drafted, coins, noise)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    return accepted, (p.gather(1, at).log() + noise.gather(1, at))[:, 0].argmax(-1)


def other_q(p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, coins: torch.Tensor, noise: torch.Tensor):  # type: ignore[no-untyped-def]
    """q as it was before a filter cut it: what was drafted came from another distribution than the rule is told."""
    return verify_tokens(p, 0.7 * q + 0.3 / q.shape[-1], drafted, coins, noise)


def no_bonus(p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, coins: torch.Tensor, noise: torch.Tensor):  # type: ignore[no-untyped-def]
    """After a whole chain the last position's q-biased rest is drawn from, not p."""
    accepted, token = verify_tokens(p, q, drafted, coins, noise)
    wrong = (p[:, -2].log() + noise[:, -1]).argmax(-1)
    return accepted, torch.where(accepted == q.shape[1], wrong, token)


def test_wrong_rejection_rules_fail() -> None:
    assert one_position(from_p, 0)[0] < ALPHA
    assert one_position(other_q, 0)[0] < ALPHA
    assert joint(no_bonus, 0) < ALPHA


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_ends_of_the_scale(rule: Rule) -> None:
    generator = torch.Generator().manual_seed(0)
    n, gamma, size = 500, 3, 6
    p = distribution(generator, n, gamma + 1, size)
    drafted = torch.multinomial(p[:, :-1].reshape(-1, size), 1, generator=generator).view(n, gamma)
    chance_of = uniform(generator, n, gamma), gumbel(generator, n, gamma + 1, size)
    assert bool((rule(p, p[:, :-1].clone(), drafted, *chance_of)[0] == gamma).all()), "p = q: all is accepted"
    low, high = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    low[:3], high[3:] = 1 / 3, 1 / 3
    none, token = rule(high.expand(n, gamma + 1, size), low.expand(n, gamma, size), drafted % 3, *chance_of)
    assert bool((none == 0).all()), "disjoint: nothing is"
    assert bool((token >= 3).all())


def test_point_masses_are_drafts_with_a_known_q() -> None:
    """Prompt lookup's q is all on one token: it is accepted with p of it, and the rest is p without it."""
    generator = torch.Generator().manual_seed(5)
    n, size = 200_000, 8
    p = distribution(generator, size)
    drafted = torch.full((n, 1), 2)
    q = torch.nn.functional.one_hot(drafted, size).double()
    accepted, token = verify_tokens(p.expand(n, 2, size), q, drafted, uniform(generator, n, 1), gumbel(generator, n, 2, size))
    assert float(accepted.double().mean()) == pytest.approx(float(p[2]), abs=0.005)
    first = torch.where(accepted > 0, drafted[:, 0], token)
    assert chance(torch.bincount(first, minlength=size), p) > ALPHA
    assert bool((token[accepted == 0] != 2).all())


# -- the best draft length ----------------------------------------------------------------------------------------------

TABLE = {  # alpha -> gamma* and speed-up at c = .01, .02, .05, .1, .2
    0.5: ((5, 1.88), (4, 1.79), (3, 1.63), (2, 1.46), (1, 1.25)),
    0.6: ((7, 2.30), (6, 2.17), (4, 1.92), (3, 1.67), (2, 1.40)),
    0.7: ((9, 2.97), (8, 2.76), (6, 2.35), (4, 1.98), (3, 1.58)),
    0.8: ((14, 4.23), (11, 3.82), (8, 3.09), (6, 2.47), (4, 1.87)),
    0.9: ((24, 7.49), (19, 6.37), (13, 4.67), (10, 3.43), (7, 2.37)),
}


@pytest.mark.parametrize("alpha", TABLE)
def test_the_best_gamma_is_that_of_the_table(alpha: float) -> None:
    for c, (gamma, gain) in zip((0.01, 0.02, 0.05, 0.1, 0.2), TABLE[alpha], strict=True):
        gains = [expected_tokens(alpha, depth) / (depth * c + 1.0) for depth in range(65)]
        assert gains.index(max(gains)) == gamma
        assert max(gains) == pytest.approx(gain, abs=0.006)


@pytest.mark.parametrize("alpha", TABLE)
def test_expected_tokens_by_simulation(alpha: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for gamma in (1, 3, 8):
        hits = (uniform(generator, 100_000, gamma) < alpha).long().cumprod(1).sum(1) + 1
        assert float(hits.double().mean()) == pytest.approx(expected_tokens(alpha, gamma), rel=0.02)


def test_worked_numbers() -> None:
    """alpha = .8, gamma = 5: 3.69 tokens at 1.63 times the arithmetic (W23); alpha = .75, gamma = 7: 3.60."""
    assert expected_tokens(0.8, 5) == pytest.approx(3.69, abs=0.005)
    assert 6 / expected_tokens(0.8, 5) == pytest.approx(1.63, abs=0.005)
    assert expected_tokens(0.75, 7) == pytest.approx(3.60, abs=0.005)
