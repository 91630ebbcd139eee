"""Temperature and the filters that choose which tokens may be drawn: pure functions on rows of logits.

Each takes logits z [r, m] float32 and one setting per row (a number, or a tensor [r]). It returns new logits, -inf for tokens
that may not be drawn. NaN is the caller's to refuse. Columns are tokens in ascending order of their ids; of equal logits the
lowest id comes first. At its neutral setting a filter returns z's own bits.

Sums of probabilities are in fixed point. Integers add up to the same total in any order, so a row's result does not depend on
threads, batch or device.
"""

import math

import torch

from headrace.ops.noise import REACH

Setting = torch.Tensor | float
POINT = 2.0**40  # fixed point; a token 28 nats below the best weighs nothing
SLACK = 2.0**-20  # a sum this close to its goal has reached it: float32 logits are no finer
BINS, BINS_PER_NAT = 4096, 128
NEVER = float("-inf")
LN2 = math.log(2)


def temperature(z: torch.Tensor, t: Setting) -> torch.Tensor:
    """z / T for T > 0; T = 0 is argmax and not handled here."""
    return z / _column(z, t, torch.float32)


def top_k(z: torch.Tensor, k: Setting) -> torch.Tensor:
    """Keep the k largest, of equals the lowest ids; k = 0 or k >= m keeps all.

    Source: Fan et al., "Hierarchical Neural Story Generation", arXiv 1805.04833.
    """
    width = z.shape[-1]
    count = _column(z, k, torch.int64)
    count = count.masked_fill(count == 0, width).clamp(max=width)
    largest = z.topk(int(count.max()), sorted=True).values
    return _keep(z, z, largest.gather(-1, count - 1), count)


def top_p(z: torch.Tensor, p: Setting) -> torch.Tensor:
    """Keep the nucleus: the smallest set of likeliest tokens whose probabilities reach p, 0 < p <= 1. The token that crosses p
    is included, so at least one is kept.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv 1904.09751.
    """
    shares = fixed(z.double().sub_(_best(z)).exp_())
    return _keep(z, z, *_prefix(z, shares, _column(z, p, torch.float64)))


def typical(z: torch.Tensor, p: Setting) -> torch.Tensor:
    """Keep the tokens whose surprise is closest to the entropy, until their probabilities reach p. -log p_i - H is the mean
    logit minus logit i, so the entropy itself is not computed.

    Source: Meister et al., "Locally Typical Sampling", arXiv 2202.00666.
    """
    logit = z.double().sub_(_best(z))
    weight = logit.exp()
    total = fixed(weight * logit.clamp_min(-1e3)).sum(-1, keepdim=True)  # -inf weighs 0, and 0 * -inf is NaN
    shares = fixed(weight)
    mean = total.double() / shares.sum(-1, keepdim=True).clamp_(min=1).double()
    nearness = logit.sub_(mean).abs_().neg_()
    return _keep(z, nearness, *_prefix(nearness, shares, _column(z, p, torch.float64)))


def min_p(z: torch.Tensor, p: Setting) -> torch.Tensor:
    """Keep the tokens at least p times as likely as the best, 0 <= p <= 1; 0 keeps all.

    Source: Nguyen et al., "Min-p Sampling", arXiv 2407.01082.
    """
    far = z.double() - _best(z) < _column(z, p, torch.float64).log() - SLACK
    return z.masked_fill(far, NEVER)


def top_n_sigma(z: torch.Tensor, n: Setting) -> torch.Tensor:
    """Keep the logits within n standard deviations, over all possible tokens, of the best. Scaling all logits scales both
    sides, so the temperature does not change the result. Distances beyond 2**16 count as 2**16.

    Source: Tang et al., "Top-nσ", arXiv 2411.07641.
    """
    possible = z > NEVER
    distance = _best(z).double().sub(z.double()).clamp_(max=2.0**16).masked_fill_(~possible, 0)
    count = possible.sum(-1, keepdim=True).clamp_(min=1).double()
    mean = (distance * 2.0**16).round_().to(torch.int64).sum(-1, keepdim=True).double() / 2.0**16 / count
    square = (distance * distance * 2.0**12).round_().to(torch.int64).sum(-1, keepdim=True).double() / 2.0**12 / count
    sigma = (square - mean * mean).clamp_(min=0).sqrt_()
    return z.masked_fill(z.double() - _best(z) < -(sigma * _column(z, n, torch.float64)), NEVER)


def xtc(z: torch.Tensor, threshold: Setting) -> torch.Tensor:
    """Exclude top choices: of the tokens with this probability or more keep only the least likely. (p-e-w, 2024)

    Of equals the lowest id is the likelier. Changes nothing where fewer than two tokens are that likely.
    """
    shares = fixed(z.double().sub_(_best(z)).exp_())
    goal = (shares.sum(-1, keepdim=True) * (_column(z, threshold, torch.float64) * (1 - SLACK))).ceil().to(torch.int64)
    top = (shares >= goal) & (shares > 0)
    least = z.masked_fill(~top, float("inf")).amin(-1, keepdim=True)
    equal = top & (z == least)
    last = z.shape[-1] - 1 - equal.flip(-1).to(torch.int8).argmax(-1, keepdim=True)
    return z.masked_fill(top & (torch.arange(z.shape[-1], device=z.device) != last), NEVER)


def surprise(z: torch.Tensor, most: Setting) -> torch.Tensor:
    """Keep the best token, and those whose surprise, -log2 of the probability, is at most `most` bits (mirostat 2)."""
    limit = log_total(z) - _column(z, most, torch.float64) * LN2 - SLACK
    return z.masked_fill(z.double() - _best(z) < limit.clamp_(max=0), NEVER)


def reachable(z: torch.Tensor) -> torch.Tensor:
    """Leave out the tokens no noise can lift over the best one: the same draw with less noise."""
    best = z.amax(-1, keepdim=True)
    margin = best.abs() * 2.0**-20  # what float32 may round away of a large logit + noise
    return z.masked_fill(z < best - REACH - margin, NEVER)


def log_total(z: torch.Tensor) -> torch.Tensor:
    """ln of the sum of exp(z - best) over each row: float64 [r, 1]; NaN where a row is no distribution."""
    total = fixed(z.double().sub_(z.amax(-1, keepdim=True)).exp_()).sum(-1, keepdim=True).double() / POINT
    return total.log()


def top_values(key: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of each row [r, m], largest first and of equals the lowest column: (values, columns).

    Columns of -inf are in no particular order.
    """
    if width == 0:
        return key[:, :0], torch.zeros(len(key), 0, dtype=torch.int64, device=key.device)
    if width < key.shape[-1]:
        values, columns = key.topk(width + 1)
        cut = (values[:, -1] == values[:, -2]) & (values[:, -1] > NEVER)
        columns = columns[:, :-1].sort(-1).values
    else:
        columns = torch.arange(key.shape[-1], device=key.device).expand(key.shape)
        cut = torch.zeros(len(key), dtype=torch.bool, device=key.device)
    values, order = key.gather(-1, columns).sort(stable=True, dim=-1, descending=True)
    columns = columns.gather(-1, order)
    if cut.any():  # topk takes any of the equals on its edge: sort these rows as a whole
        sorted_, order = key[cut].sort(stable=True, dim=-1, descending=True)
        values[cut], columns[cut] = sorted_[:, :width], order[:, :width]
    return values, columns


def compact(z: torch.Tensor, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Drop the columns that are -inf in all rows, if few remain: z [r, m'] and the token ids [r, m'], ascending. Short rows are
    padded with -inf. Returns the arguments if nothing is gained."""
    kept = z > NEVER
    counts = kept.sum(-1)
    width = max(int(counts.max()), 1)
    if width * 8 > z.shape[-1]:
        return z, ids
    rows, columns = kept.nonzero(as_tuple=True)
    places = torch.arange(len(rows), device=z.device) - (counts.cumsum(-1) - counts)[rows]
    short = z.new_full((len(z), width), NEVER)
    short[rows, places] = z[rows, columns]
    names = torch.zeros(short.shape, dtype=torch.int64, device=z.device)
    names[rows, places] = columns if ids is None else ids[rows, columns]
    return short, names


def expand(z: torch.Tensor, ids: torch.Tensor | None, width: int) -> torch.Tensor:
    """Undo `compact`: logits [r, width] with -inf for every token that is not among `ids`."""
    if ids is None:
        return z
    rows, columns = (z > NEVER).nonzero(as_tuple=True)
    full = z.new_full((len(z), width), NEVER)
    full[rows, ids[rows, columns]] = z[rows, columns]
    return full


def _column(z: torch.Tensor, setting: Setting, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(setting, dtype=dtype, device=z.device).expand(len(z))[:, None]


def _best(z: torch.Tensor) -> torch.Tensor:
    """The largest of each row [r, 1], finite, so that z - best is a number even if all are -inf."""
    return z.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)


def fixed(weight: torch.Tensor) -> torch.Tensor:
    """The weights in fixed point; overwrites `weight`."""
    return weight.mul_(POINT).round_().to(torch.int64)


def _prefix(key: torch.Tensor, shares: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest prefix in falling order of `key` whose shares reach p: its last key and its length, both [r, 1]. A histogram
    over the keys finds the bin in which p is reached; only that bin is sorted."""
    total = shares.sum(-1, keepdim=True)
    goal = torch.where(p >= 1, total + 1, (total * (p * (1 - SLACK))).ceil().to(torch.int64))
    bins = (_best(key) - key).mul_(BINS_PER_NAT).clamp_(max=BINS - 1).to(torch.int64)
    sums = shares.new_zeros(len(key), BINS).scatter_add_(-1, bins, shares).cumsum_(-1)
    edge = (sums < goal).sum(-1, keepdim=True)
    before = sums.gather(-1, (edge - 1).clamp_(min=0)).masked_fill_(edge == 0, 0)
    within, columns = compact(key.masked_fill(bins != edge, NEVER))
    values, order = within.sort(stable=True, dim=-1, descending=True)
    parts = shares.gather(-1, order if columns is None else columns.gather(-1, order))
    place = (before + parts.cumsum(-1) < goal).sum(-1, keepdim=True)  # of the crossing token, which is kept
    place.clamp_(max=values.shape[-1] - 1)
    return values.gather(-1, place), (bins < edge).sum(-1, keepdim=True) + place + 1


def _keep(z: torch.Tensor, key: torch.Tensor, last: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """z where key is among the row's `count` largest, the least of which is `last`; of equals the lowest columns."""
    keep = key >= last
    if (keep.sum(-1, keepdim=True) > count).any():
        equal = key == last
        spare = count - (key > last).sum(-1, keepdim=True)
        keep &= ~equal | (equal.cumsum(-1) <= spare)
    return z.masked_fill(~keep, NEVER)
