"""Verification by rejection: a token drafted from q is accepted with probability min(1, p/q); otherwise the token is drawn from
max(0, p − q), normalised.

The output follows p exactly for any q, but it is another sample than plain decoding gives. p and q must be processed alike:
temperature, filters, penalties. The block rule accepts a chain as a whole; the output has the same distribution, and on average
never fewer tokens are accepted.

The loop uses `draw_draft` and `verify`; `row_spec` describes the processing of a row, for both models. A round is a draft with
its verification, and each round has noise of its own: under the block rule a rejection reveals something about the tokens
drafted behind it, so no other round may use the same noise.

Source: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318; Sun et al., "Block Verification", arXiv 2403.10444.
"""

import math

import numpy as np
import torch

from headrace.data.types import Request, Sequence
from headrace.ops.keys import Purpose, round_key
from headrace.ops.noise import coins, gumbel_at
from headrace.ops.processing import RowSpec
from headrace.ops.sampling import draw, process


def row_spec(request: Request, seq: Sequence, path: list[int], mask: bytes = b"") -> RowSpec:
    """Processing of the row behind the drafted tokens `path`, in this round, for p and q alike."""
    return RowSpec(
        params=request.params,
        keys=[round_key(request.seed, len(seq.tokens), seq.decode.index)],
        tokens=seq.tokens,
        prompt_len=seq.prompt_len,
        path=path,
        stop_ids=sorted(request.stop_ids),
        purpose=Purpose.DRAFT,
        mask=mask,
    )


def draw_draft(logits: torch.Tensor, spec: RowSpec) -> tuple[int, torch.Tensor] | None:
    """A drafted token and its distribution q [V] float32; None if no token can be drawn. logits [V] are the draft model's."""
    z = process(logits[None], [spec])
    q = torch.softmax(z.double(), -1)[0].float()
    if not bool(q.isfinite().all()):
        return None
    (token,) = draw(z, torch.tensor(spec.keys), torch.tensor([spec.position]), Purpose.DRAFT).tolist()
    return token, q


def verify(logits: torch.Tensor, specs: list[RowSpec], chain: list[int], q: list[bytes] | None) -> tuple[int, int | None]:
    """Number of accepted tokens of `chain` [gamma], and the token after them; None if its row cannot be drawn from.

    logits [gamma + 1, V]: the target's before each drafted token and after the last. specs: how to process them. q: the
    distributions as float32 bytes; None: the chain was not sampled, and each q is 1 at its token. A row that cannot be drawn
    from (broken, or fully masked behind a grammar's end) ends the chain before it.
    """
    z = process(logits, specs).double()
    good = [math.isfinite(best) for best in z.amax(-1).tolist()]
    end = min(good.index(False) if False in good else len(chain), len(chain))
    if not good[0]:
        return 0, None
    p = torch.softmax(z[: end + 1], -1)
    if not good[end]:
        p[end] = 1.0 / p.shape[-1]
    drafted, size = torch.tensor(chain[:end], dtype=torch.int64), p.shape[-1]
    rule = verify_block if specs[0].params.verification == "block" else verify_tokens
    keys = torch.tensor([spec.keys[0] for spec in specs[: end + 1]])
    places = torch.tensor([spec.position for spec in specs[: end + 1]])
    noise = gumbel_at(keys, places, size, Purpose.RESIDUAL).double()
    thrown = coins(keys[:end], places[:end], Purpose.ACCEPT)
    accepted, token = rule(p[None], _rows(q, drafted, size)[None], drafted[None], thrown[None], noise[None])
    at = int(accepted[0])
    return at, int(token[0]) if good[at] else None


def _rows(q: list[bytes] | None, drafted: torch.Tensor, size: int) -> torch.Tensor:
    """The distributions q of a chain's tokens: float64 [gamma, size]. q is None: 1 at the token."""
    if q is None:
        return torch.nn.functional.one_hot(drafted, size).double()
    rows = torch.zeros(len(drafted), size, dtype=torch.float64)
    for row, each in zip(rows, q, strict=False):
        given = torch.from_numpy(np.frombuffer(each, dtype="<f4").copy())[:size]  # files may pad their vocabularies apart
        row[: len(given)] = given
    return rows


def verify_tokens(
    p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, coins: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify token by token. Returns the number of accepted tokens of each chain [n], and the token after them [n].

    p [n, gamma + 1, V] and q [n, gamma, V]: probabilities before each drafted token (and after the last). drafted [n, gamma]:
    drawn from q. coins [n, gamma]: uniform in [0, 1). noise [n, gamma + 1, V]: Gumbel.
    """
    ratio = _of(p[:, :-1], drafted) / _of(q, drafted)
    accepted = (coins < ratio).long().cumprod(1).sum(1)
    return accepted, _draw(_left(p, q, accepted, torch.ones_like(accepted, dtype=p.dtype)), noise, accepted)


def verify_block(
    p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, coins: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify chains as wholes, by the block rule. Arguments and result as those of `verify_tokens`."""
    n, gamma = drafted.shape
    share = torch.ones(n, dtype=p.dtype)  # product of p / q over the chain so far, cut at 1 after each token
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
    """Probabilities [n, gamma] of tokens [n, gamma] in distributions [n, gamma, V]."""
    return probabilities.gather(-1, tokens[..., None])[..., 0]


def _left(p: torch.Tensor, q: torch.Tensor, accepted: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The weights [n, V] of the token after the accepted ones, not normalised: max(0, share p − q); p after a whole chain."""
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
