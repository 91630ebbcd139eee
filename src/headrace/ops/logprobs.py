"""Log-probabilities, ranks and best alternatives of tokens, drawn or of a prompt."""

import math

import torch

from headrace.data.plan import TokenLogprob
from headrace.ops.filters import NEVER, log_total, top_values

CHUNK = 2**19  # logits looked at together


def token_logprobs(
    logits: torch.Tensor, columns: torch.Tensor, k: int = 0, ids: torch.Tensor | None = None
) -> list[TokenLogprob]:
    """Log-softmax of one column [r] of each row of logits [r, m], their ranks, and the k best tokens of each row.

    Columns are token ids, or `ids` [r, m] names the tokens of the columns, in ascending order. Ranks count from 1 in the
    order greedy decoding has: likelier first, of equals the lowest id. Tokens of probability 0 are not listed. A row
    without a distribution (NaN, +inf, or all -inf) gives NaN, rank 0 and no alternatives.
    """
    step = max(1, CHUNK // logits.shape[-1])
    out: list[TokenLogprob] = []
    for start in range(0, len(logits), step):
        part = slice(start, start + step)
        out += _chunk(logits[part].float(), columns[part, None].to(logits.device), k, None if ids is None else ids[part])
    return out


def best_tokens(logits: torch.Tensor, permitted: torch.Tensor, k: int) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """The k best permitted tokens of each row with their log-softmax: ids and numbers, best first, lowest id on ties.

    `permitted` [r, m] is `logits` [r, m] with -inf where a token may not come; how likely the others are stays as it was.
    Tokens of probability 0 are not listed, and nothing is where a row is no distribution.
    """
    step = max(1, CHUNK // logits.shape[-1])
    out = []
    for start in range(0, len(logits), step):
        z = logits[start : start + step].float()
        top, order = top_values(permitted[start : start + step].float(), min(k, z.shape[-1]))
        logp = ((top.double() - z.amax(-1, keepdim=True)) - log_total(z)).float()
        for ids, values in zip(order.tolist(), logp.tolist(), strict=True):
            listed = sum(value > NEVER for value in values)  # NaN is not above
            out.append((tuple(ids[:listed]), tuple(values[:listed])))
    return out


def _chunk(z: torch.Tensor, column: torch.Tensor, k: int, ids: torch.Tensor | None) -> list[TokenLogprob]:
    best, total = z.amax(-1, keepdim=True), log_total(z)
    value = z.gather(-1, column)
    before = torch.arange(z.shape[-1], device=z.device) < column
    ranks = (1 + (z > value).sum(-1) + ((z == value) & before).sum(-1)).tolist()
    top, order = top_values(z, min(k, z.shape[-1]))
    named = torch.cat([column, order], -1) if ids is None else ids.gather(-1, torch.cat([column, order], -1))
    logp = ((torch.cat([value, top], -1).double() - best) - total).float()
    out = []
    for rank, (token, *others), (logprob, *rest) in zip(ranks, named.tolist(), logp.tolist(), strict=True):
        if math.isnan(logprob):
            out.append(TokenLogprob(token, logprob))
            continue
        listed = sum(value > NEVER for value in rest)
        out.append(TokenLogprob(token, logprob, rank, others[:listed], rest[:listed]))
    return out
