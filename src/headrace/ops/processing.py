"""The stages that process logits before a token is drawn, in their order.

bias -> allowed ids -> mask -> bad words, min_tokens, no-repeat-ngram -> repetition -> frequency and presence -> DRY ->
timestamps -> temperature -> top-n-sigma -> top-k -> typical -> top-p -> min-p -> XTC -> mirostat. A greedy row stops before
temperature. A stage that is neutral for a row is skipped for it, so neutral settings do not change its bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headrace.data.params import SamplingParams
from headrace.ops import filters, penalties
from headrace.ops.keys import Key, Purpose
from headrace.ops.noise import coins
from headrace.ops.penalties import TokenCounts


@dataclass(slots=True)
class RowSpec:
    """How to process and draw from one row of logits: one token per key, the next after `tokens` and `path`.

    keys: noise keys, `key(seed, child)`; greedy rows use only their number. tokens: prompt and output so far. path: draft
    tokens between these and this row. counts: without it, penalties count `tokens` anew; with it, only the output beyond
    `counts.length`. stop_ids: barred before `params.min_tokens`. mu: mirostat's state before this draw, in bits; None at the
    start of an output. mask: under a grammar a bit per allowed token id (little-endian words of 32).
    """

    params: SamplingParams
    keys: Sequence[Key]
    tokens: Sequence[int]
    prompt_len: int
    path: Sequence[int] = ()
    stop_ids: Sequence[int] = ()
    counts: TokenCounts | None = None
    purpose: int = Purpose.TARGET
    mu: float | None = None
    mask: bytes = b""

    @property
    def position(self) -> int:
        """The index, in the sequence, of the token to be drawn."""
        return len(self.tokens) + len(self.path)

    @property
    def history(self) -> list[int]:
        return [*self.tokens, *self.path]

    def output(self, start: int = 0) -> list[int]:
        """The output tokens before this one, from number `start` on."""
        return [*self.tokens[self.prompt_len + start :], *self.path]


class Stage(NamedTuple):
    """One stage: which rows need it, and its function on them."""

    needed: Callable[[SamplingParams], bool]
    apply: Callable[[torch.Tensor, list[RowSpec]], torch.Tensor]
    narrows: bool = False  # may leave few tokens


def _setting(rows: Sequence[RowSpec], name: str) -> torch.Tensor:
    return torch.tensor([getattr(row.params, name) for row in rows], dtype=torch.float64)


def _ban(z: torch.Tensor, rows: list[RowSpec]) -> torch.Tensor:
    banned = []
    for row in rows:
        params, ids = row.params, set[int]()
        if params.bad_words:
            ids |= penalties.completed_words(row.history, params.bad_words)
        if row.position - row.prompt_len < params.min_tokens:
            ids.update(row.stop_ids)
        if params.no_repeat_ngram:
            ids |= penalties.repeated_ngrams(row.history, params.no_repeat_ngram)
        banned.append(ids)
    return penalties.ban(z, banned)


def _counts(z: torch.Tensor, row: RowSpec) -> TokenCounts:
    counts = row.counts or TokenCounts(z.shape[-1], row.tokens[: row.prompt_len], device=z.device)
    return counts.plus(row.output(counts.length))


def _repetition(z: torch.Tensor, rows: list[RowSpec]) -> torch.Tensor:
    seen = torch.stack([_counts(z, row).seen for row in rows])
    return penalties.repetition(z, seen, _setting(rows, "repetition_penalty"))


def _frequency_presence(z: torch.Tensor, rows: list[RowSpec]) -> torch.Tensor:
    counts = torch.stack([_counts(z, row).output for row in rows])
    frequency, presence = _setting(rows, "frequency_penalty"), _setting(rows, "presence_penalty")
    return penalties.frequency_presence(z, counts, frequency, presence)


def _dry(z: torch.Tensor, rows: list[RowSpec]) -> torch.Tensor:
    costs = [penalties.dry(row.history, row.params) for row in rows]
    return penalties.bias(z, [{token: -cost for token, cost in one.items()} for one in costs])


def _mass(z: torch.Tensor, rows: list[RowSpec]) -> torch.Tensor:
    return penalties.compare_mass(z, [row.params.timestamps.first for row in rows if row.params.timestamps is not None])


def _xtc(z: torch.Tensor, rows: list[RowSpec]) -> torch.Tensor:
    """XTC. Each row has one key here, whose coin decides."""
    thrown = coins(torch.tensor([row.keys[0] for row in rows]), torch.tensor([row.position for row in rows]))
    excludes = (thrown < _setting(rows, "xtc_probability")).to(z.device)
    return torch.where(excludes[:, None], filters.xtc(z, _setting(rows, "xtc_threshold")), z)


def _mirostat(z: torch.Tensor, rows: list[RowSpec]) -> torch.Tensor:
    return filters.surprise(z, torch.tensor([allowed_surprise(row) for row in rows], dtype=torch.float64))


def allowed_surprise(row: RowSpec) -> float:
    """Mirostat's mu before a draw, in bits; twice the target at the start.

    Source: Basu et al., "Mirostat", arXiv 2007.14966, algorithm 2.
    """
    return 2 * row.params.mirostat_tau if row.mu is None else row.mu


# Stages that bar tokens.
PERMITTING = (
    Stage(
        lambda p: p.allowed_token_ids is not None,
        lambda z, rows: penalties.allow(z, [r.params.allowed_token_ids for r in rows]),
    ),
    Stage(lambda p: p.constrained, lambda z, rows: penalties.mask(z, [r.mask for r in rows])),
    Stage(lambda p: bool(p.bad_words or p.min_tokens or p.no_repeat_ngram), _ban),
)
# Stages before temperature. The order is documented behaviour: changing it changes distributions.
EDITS = (
    Stage(lambda p: bool(p.logit_bias), lambda z, rows: penalties.bias(z, [r.params.logit_bias for r in rows])),
    *PERMITTING,
    Stage(lambda p: p.repetition_penalty != 1.0, _repetition),
    Stage(lambda p: bool(p.frequency_penalty or p.presence_penalty), _frequency_presence),
    Stage(lambda p: p.dry_multiplier > 0, _dry),
    Stage(lambda p: p.timestamps is not None, _mass),
)
STAGES = (
    *EDITS,
    Stage(
        lambda p: not p.greedy and p.temperature != 1.0,
        lambda z, rows: filters.temperature(z, _setting(rows, "temperature")),
    ),
    Stage(
        lambda p: not p.greedy and p.top_n_sigma > 0,
        lambda z, rows: filters.top_n_sigma(z, _setting(rows, "top_n_sigma")),
        True,
    ),
    Stage(lambda p: not p.greedy and p.top_k > 0, lambda z, rows: filters.top_k(z, _setting(rows, "top_k")), True),
    Stage(
        lambda p: not p.greedy and p.typical_p < 1.0,
        lambda z, rows: filters.typical(z, _setting(rows, "typical_p")),
        True,
    ),
    Stage(lambda p: not p.greedy and p.top_p < 1.0, lambda z, rows: filters.top_p(z, _setting(rows, "top_p")), True),
    Stage(lambda p: not p.greedy and p.min_p > 0.0, lambda z, rows: filters.min_p(z, _setting(rows, "min_p")), True),
    Stage(lambda p: not p.greedy and p.xtc_probability > 0, _xtc),
    Stage(lambda p: not p.greedy and p.mirostat_tau > 0, _mirostat),
)


def permitted(z: torch.Tensor, row: RowSpec) -> torch.Tensor:
    """Logits [1, V], -inf for tokens barred by an allowed list, a grammar or a ban. A row that cannot be processed is returned
    unchanged; drawing from it reports the error."""
    try:
        check_ids(row, z.shape[-1])
    except ValueError:
        return z
    for stage in PERMITTING:
        z = stage.apply(z, [row]) if stage.needed(row.params) else z
    return z


def needs(params: SamplingParams) -> tuple[bool, ...]:
    """Which of STAGES a row with these parameters needs; rows that agree can be processed together."""
    return tuple(stage.needed(params) for stage in STAGES)


def run_stages(
    z: torch.Tensor, rows: list[RowSpec], stages: Sequence[Stage] = STAGES
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the stages on rows that need the same ones: processed logits [r, m] and the token ids of the columns (None: the whole
    vocabulary)."""
    ids = None  # as long as the columns are the whole vocabulary
    for stage in stages:
        if stage.needed(rows[0].params):
            z = stage.apply(z, rows)
            if stage.narrows:
                z, ids = filters.compact(z, ids)
    return z, ids


def check_ids(row: RowSpec, vocab_size: int) -> None:
    """Raise ValueError for an id outside the vocabulary that the row's stages would look up."""
    params = row.params
    params.check_vocab(vocab_size)
    if params.constrained:
        penalties.check_mask(row.mask, vocab_size)
    if params.min_tokens and max(row.stop_ids, default=0) >= vocab_size:
        raise ValueError(f"stop id {max(row.stop_ids)} is outside the vocabulary of {vocab_size}")
    if params.dry_multiplier and max(row.history, default=0) >= vocab_size:
        raise ValueError(f"token id {max(row.history)} of the history is outside the vocabulary of {vocab_size}")
    if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
        uncounted = row.history if row.counts is None else row.output(row.counts.length)
        if max(uncounted, default=0) >= vocab_size:
            raise ValueError(f"token id {max(uncounted)} of the history is outside the vocabulary of {vocab_size}")
