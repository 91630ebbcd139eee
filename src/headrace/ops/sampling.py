"""From logits to tokens: the processing of card B1, in its order, and the draw.

bias, allowed ids, bad words, min_tokens, no-repeat-ngram -> repetition -> frequency and presence -> (greedy: argmax)
-> temperature -> top-k -> typical -> top-p -> min-p -> argmax of logit + Gumbel noise over what is kept.

A stage that is neutral for a row is skipped for it, so neutral settings leave its bits alone. Nothing of a row's result
depends on the other rows: they are only computed together where they need the same stages.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from headrace.ops import filters, penalties
from headrace.ops.logprobs import token_logprobs
from headrace.ops.noise import Key, Purpose, gumbel_at
from headrace.ops.penalties import TokenCounts
from headrace.params import SamplingParams
from headrace.types import TokenLogprob

CPU_WORK, GPU_WORK = 2**19, 2**26  # logits worked on at once; on a CPU they stay in its cache
LARGEST = 1e30  # beyond this a logit is broken, and below it no stage overflows


@dataclass(slots=True)
class RowSpec:
    """What one row of logits is to give: one token for each key, the next after `tokens` and `path`.

    `keys` are noise keys, `key(seed, child)`; greedy rows use only their number. `tokens` are the prompt and the output
    so far, `path` the draft tokens between them and this row. Without `counts`, penalties count `tokens` anew; with
    them, only the output beyond `counts.length`. `stop_ids` cannot be drawn before `params.min_tokens`.
    """

    params: SamplingParams
    keys: Sequence[Key]
    tokens: Sequence[int]
    prompt_len: int
    path: Sequence[int] = ()
    stop_ids: Sequence[int] = ()
    counts: TokenCounts | None = None
    purpose: int = Purpose.TARGET

    @property
    def position(self) -> int:
        """The index, from the start of the sequence, of the token to be drawn."""
        return len(self.tokens) + len(self.path)

    @property
    def history(self) -> list[int]:
        return [*self.tokens, *self.path]

    def output(self, start: int = 0) -> list[int]:
        """The tokens drawn before this one, from the `start`th on."""
        return [*self.tokens[self.prompt_len + start :], *self.path]


@dataclass(slots=True)
class RowResult:
    """One token per key, and its log-probability where `params.logprobs` asked for it; or why there is none."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str = ""


def sample(logits: torch.Tensor, rows: Sequence[RowSpec], raw: torch.Tensor | None = None) -> list[RowResult]:
    """Draw the tokens of each row of logits [r, V], which stay as they are.

    A row that cannot be drawn from (NaN or infinite logits, every token masked, an id outside the vocabulary) gives a
    result with `error` set; the others are not affected. `raw`: where a caller's processors have changed `logits`, what
    they were before, for raw log-probabilities.
    """
    z = logits.float()
    raw = z if raw is None else raw
    results = [RowResult(error=fault) for fault in _faults(z, rows)]
    for members in _groups(rows, [i for i, result in enumerate(results) if not result.error], _at_once(z)):
        for i, result in zip(members, _sample_group(z, raw, rows, members), strict=True):
            results[i] = result
    return results


def process(logits: torch.Tensor, rows: Sequence[RowSpec]) -> torch.Tensor:
    """The processed logits [r, V] tokens are drawn from, -inf outside the kept set; for greedy rows, after penalties.

    Their softmax is the distribution of the draw, which the rejection rule needs. A row that `sample` would refuse
    comes back as NaN, or all -inf where every token is masked.
    """
    z = logits.float()
    good = [i for i, fault in enumerate(_faults(z, rows)) if not fault]
    out = torch.full_like(z, math.nan)
    for members in _groups(rows, good, _at_once(z)):
        out[members] = filters.expand(*_run(z[members], [rows[i] for i in members]), z.shape[-1])
    return out


def draw(
    z: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    purposes: torch.Tensor | int = Purpose.TARGET,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """argmax of processed logits z [n, m] + noise, lowest id on ties -> token ids [n].

    keys [n, 2], positions [n]; `ids` [n, m] names the columns in ascending order, None where they are 0 .. m-1.
    """
    noise = gumbel_at(keys, positions, z.shape[-1] if ids is None else ids, purposes)
    best = (z + noise).argmax(-1)
    return best if ids is None else ids.gather(-1, best[:, None])[:, 0]


class Stage(NamedTuple):
    """One step of the processing: which rows need it, and what it does to them."""

    needed: Callable[[SamplingParams], bool]
    apply: Callable[[torch.Tensor, list[RowSpec]], torch.Tensor]
    narrows: bool = False  # few tokens may be left


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


# the order of card B1
STAGES = (
    Stage(lambda p: bool(p.logit_bias), lambda z, rows: penalties.bias(z, [r.params.logit_bias for r in rows])),
    Stage(
        lambda p: p.allowed_token_ids is not None,
        lambda z, rows: penalties.allow(z, [r.params.allowed_token_ids for r in rows]),
    ),
    Stage(lambda p: bool(p.bad_words or p.min_tokens or p.no_repeat_ngram), _ban),
    Stage(lambda p: p.repetition_penalty != 1.0, _repetition),
    Stage(lambda p: bool(p.frequency_penalty or p.presence_penalty), _frequency_presence),
    Stage(
        lambda p: not p.greedy and p.temperature != 1.0,
        lambda z, rows: filters.temperature(z, _setting(rows, "temperature")),
    ),
    Stage(lambda p: not p.greedy and p.top_k > 0, lambda z, rows: filters.top_k(z, _setting(rows, "top_k")), True),
    Stage(
        lambda p: not p.greedy and p.typical_p < 1.0,
        lambda z, rows: filters.typical(z, _setting(rows, "typical_p")),
        True,
    ),
    Stage(lambda p: not p.greedy and p.top_p < 1.0, lambda z, rows: filters.top_p(z, _setting(rows, "top_p")), True),
    Stage(lambda p: not p.greedy and p.min_p > 0.0, lambda z, rows: filters.min_p(z, _setting(rows, "min_p")), True),
)


def _at_once(z: torch.Tensor) -> int:
    """How many rows to work on together."""
    return max(1, (CPU_WORK if z.device.type == "cpu" else GPU_WORK) // z.shape[-1])


def _groups(rows: Sequence[RowSpec], members: Iterable[int], size: int) -> list[list[int]]:
    """The row numbers `members`, up to `size` together that need the same stages and kind of log-probability."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i in members:
        params = rows[i].params
        need = (params.greedy, _report_of(params), *(stage.needed(params) for stage in STAGES))
        groups.setdefault(need, []).append(i)
    return [group[at : at + size] for group in groups.values() for at in range(0, len(group), size)]


def _report_of(params: SamplingParams) -> str:
    return "" if params.logprobs is None else params.logprobs_mode


def _sample_group(z: torch.Tensor, raw: torch.Tensor, rows: Sequence[RowSpec], members: list[int]) -> list[RowResult]:
    chosen = [rows[i] for i in members]
    processed, ids = _run(_take(z, members), chosen)
    tokens = _draw_rows(processed, ids, chosen)
    match _report_of(chosen[0].params):
        case "raw":
            logprobs = _logprobs(_take(raw, members), None, chosen, tokens)
        case "processed":
            logprobs = _logprobs(processed, ids, chosen, tokens)
        case _:
            logprobs = [[] for _ in members]
    faults = [_fault_after(best) for best in processed.amax(-1).tolist()]
    return [
        RowResult(error=fault) if fault else RowResult(drawn, reported)
        for fault, drawn, reported in zip(faults, tokens, logprobs, strict=True)
    ]


def _take(z: torch.Tensor, members: list[int]) -> torch.Tensor:
    return z if members == list(range(len(z))) else z[members]


def _run(z: torch.Tensor, rows: list[RowSpec]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Take rows of one group through the stages they need: processed logits [r, m] and the token ids of the columns."""
    ids = None
    for stage in STAGES:
        if stage.needed(rows[0].params):
            z = stage.apply(z, rows)
            if stage.narrows:
                z, ids = filters.compact(z, ids)
    return z, ids


def _draw_rows(z: torch.Tensor, ids: torch.Tensor | None, rows: list[RowSpec]) -> list[list[int]]:
    """The tokens of rows of one group, one for each key."""
    counts = [len(row.keys) for row in rows]
    if rows[0].params.greedy:
        return [[token] * n for token, n in zip(z.argmax(-1).tolist(), counts, strict=True)]
    z, ids = filters.compact(filters.reachable(z), ids)
    whose = torch.tensor([i for i, n in enumerate(counts) for _ in range(n)], device=z.device)
    keys = torch.tensor([key for row in rows for key in row.keys], dtype=torch.int64).to(z.device)
    about = torch.tensor([(row.position, row.purpose) for row in rows]).to(z.device)[whose]
    step = _at_once(z)
    drawn: list[int] = []
    for start in range(0, len(whose), step):
        part = slice(start, start + step)
        names = None if ids is None else ids[whose[part]]
        drawn += draw(z[whose[part]], keys[part], about[part, 0], about[part, 1], names).tolist()
    rest = iter(drawn)
    return [[next(rest) for _ in range(n)] for n in counts]


def _logprobs(
    z: torch.Tensor, ids: torch.Tensor | None, rows: list[RowSpec], tokens: list[list[int]]
) -> list[list[TokenLogprob]]:
    """What is reported of each row's tokens under logits z [r, m], whose columns are the tokens `ids`."""
    whose = [i for i, drawn in enumerate(tokens) for _ in drawn]
    most = max(row.params.logprobs or 0 for row in rows)
    z, ids = _take(z, whose), None if ids is None else _take(ids, whose)
    columns = torch.tensor([token for drawn in tokens for token in drawn], dtype=torch.int64, device=z.device)
    if ids is not None:
        columns = (ids == columns[:, None]).to(torch.int8).argmax(-1)
    out: list[list[TokenLogprob]] = [[] for _ in rows]
    for i, entry in zip(whose, token_logprobs(z, columns, most, ids), strict=True):
        k = rows[i].params.logprobs
        entry.top_ids, entry.top_logprobs = entry.top_ids[:k], entry.top_logprobs[:k]
        out[i].append(entry)
    return out


def _faults(z: torch.Tensor, rows: Sequence[RowSpec]) -> list[str]:
    """Why each row cannot be drawn from; empty where it can."""
    faults = []
    for best, row in zip(z.amax(-1).tolist(), rows, strict=True):
        fault = "" if abs(best) <= LARGEST else f"the model's logits are broken: the largest is {best}"
        try:
            _check_ids(row, z.shape[-1])
        except ValueError as error:
            fault = fault or str(error)
        faults.append(fault)
    return faults


def _check_ids(row: RowSpec, vocab_size: int) -> None:
    """Raise ValueError for an id the stages of this row would look up outside the vocabulary."""
    params = row.params
    params.check_vocab(vocab_size)
    if params.min_tokens and max(row.stop_ids, default=0) >= vocab_size:
        raise ValueError(f"stop id {max(row.stop_ids)} is outside the vocabulary of {vocab_size}")
    if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
        uncounted = row.history if row.counts is None else row.output(row.counts.length)
        if max(uncounted, default=0) >= vocab_size:
            raise ValueError(f"token id {max(uncounted)} of the history is outside the vocabulary of {vocab_size}")


def _fault_after(best: float) -> str:
    if best > -math.inf:
        return ""
    return (
        "no token can be drawn: allowed_token_ids, bad_words, logit_bias, min_tokens and no_repeat_ngram together rule "
        "out every one; relax one of them"
    )
