"""The second rule of verification: accept a drafted token with probability min(1, p/q), else draw from what is left of p.

The output follows p exactly, whatever q is (Leviathan et al. 2022, Chen et al. 2023; card F1); unlike the walk it is another
sample than plain decoding would give. p and q must have been processed alike: temperature, filters, penalties. The block
rule (Sun et al. 2024) judges a chain as a whole: the same distribution, and never fewer tokens on average.
"""

import torch


def verify_tokens(
    p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, coins: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token: how many of each chain are accepted [n], and the token after them [n].

    p [n, gamma + 1, V] and q [n, gamma, V] are probabilities before each drafted token (and after the last), `drafted`
    [n, gamma] was drawn from q, coins [n, gamma] are uniform in [0, 1), noise [n, gamma + 1, V] is Gumbel.
    """
    ratio = _of(p[:, :-1], drafted) / _of(q, drafted)
    accepted = (coins < ratio).long().cumprod(1).sum(1)
    return accepted, _draw(_left(p, q, accepted, torch.ones_like(accepted, dtype=p.dtype)), noise, accepted)


def verify_block(
    p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, coins: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chain as a whole: like `verify_tokens`, by the block rule."""
    n, gamma = drafted.shape
    share = torch.ones(n, dtype=p.dtype)  # min over the chain so far of the product of p / q, cut at 1
    shares = [share]
    accepted = torch.zeros(n, dtype=torch.int64)
    for place in range(gamma):
        ratio = _of(p[:, place : place + 1], drafted[:, place : place + 1])[:, 0] / _of(q, drafted)[:, place]
        share = (share * ratio).clamp(max=1.0)
        shares.append(share)
        if place + 1 < gamma:
            left = (share[:, None] * p[:, place + 1] - q[:, place + 1]).clamp(min=0.0).sum(1)
            chance = left / (left + 1.0 - share).clamp(min=1e-300)
        else:
            chance = share
        accepted = torch.where(coins[:, place] < chance, place + 1, accepted)
    kept = torch.stack(shares, 1).gather(1, accepted[:, None])[:, 0]
    return accepted, _draw(_left(p, q, accepted, kept), noise, accepted)


def _of(probabilities: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return probabilities.gather(-1, tokens[..., None])[..., 0]


def _left(p: torch.Tensor, q: torch.Tensor, accepted: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """What the next token is drawn from [n, V], not normalised: max(0, share p - q), and p after a whole chain."""
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    mine = p.gather(1, at)[:, 0]
    whole = accepted == q.shape[1]
    other = q.gather(1, at.clamp(max=q.shape[1] - 1))[:, 0]
    left = torch.where(whole[:, None], mine, (share[:, None] * mine - other).clamp(min=0.0))
    # Where p and q agree to rounding nothing is left, and any draw from p is right.
    return torch.where(left.sum(1, keepdim=True) > 0, left, mine)


def _draw(weights: torch.Tensor, noise: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """argmax of log weight + Gumbel, with the noise of the position after the accepted tokens."""
    at = accepted[:, None, None].expand(-1, 1, weights.shape[-1])
    return (weights.log() + noise.gather(1, at)[:, 0]).argmax(-1)
