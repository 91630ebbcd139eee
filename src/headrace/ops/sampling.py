"""From logits to tokens: the processing stages, then argmax of processed logit + Gumbel noise over the kept tokens. A row's
result does not depend on the other rows; rows are computed together if they need the same stages."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from headrace.data.params import SamplingParams
from headrace.data.plan import TokenLogprob
from headrace.ops import filters
from headrace.ops.keys import Purpose
from headrace.ops.logprobs import token_logprobs
from headrace.ops.noise import gumbel_at
from headrace.ops.processing import EDITS, STAGES, RowSpec, Stage, allowed_surprise, check_ids, needs, run_stages

__all__ = ["RowResult", "RowSpec", "draw", "process", "sample"]

CPU_WORK, GPU_WORK = 2**19, 2**26  # logits worked on at once; on a CPU they stay in its cache
LARGEST = 1e30  # beyond this a logit is broken, and below it no stage overflows


@dataclass(slots=True)
class RowResult:
    """One token per key, with log-probabilities if `params.logprobs` asks for them; or an error."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    mus: list[float] = field(default_factory=list)  # mirostat's state after each token
    error: str = ""


def sample(logits: torch.Tensor, rows: Sequence[RowSpec], raw: torch.Tensor | None = None) -> list[RowResult]:
    """Draw the tokens of each row of logits [r, V], which are not changed.

    A row that cannot be drawn from (NaN or infinite logits, every token masked, an id outside the vocabulary) has a result with
    `error` set; the others are not affected. raw: the logits before a caller's processors, for raw log-probabilities.
    """
    if any(row.params.xtc_probability and len(row.keys) > 1 for row in rows):
        return _sample_singly(logits, rows, raw)
    z = logits.float()
    raw = z if raw is None else raw
    results = [RowResult(error=fault) for fault in _faults(z, rows)]
    for members in _groups(rows, [i for i, result in enumerate(results) if not result.error], _at_once(z)):
        for i, result in zip(members, _sample_group(z, raw, rows, members), strict=True):
            results[i] = result
    return results


def _sample_singly(logits: torch.Tensor, rows: Sequence[RowSpec], raw: torch.Tensor | None) -> list[RowResult]:
    """Sample with one row per key: XTC's coin makes their allowed tokens differ."""
    whose = torch.tensor([i for i, row in enumerate(rows) for _ in row.keys], device=logits.device)
    single = [replace(row, keys=[key]) for row in rows for key in row.keys]
    drawn = iter(sample(logits[whose], single, None if raw is None else raw[whose]))
    results = []
    for row in rows:
        parts = [next(drawn) for _ in row.keys]
        whole = RowResult(error=next((part.error for part in parts if part.error), ""))
        if not whole.error:
            whole.tokens = [token for part in parts for token in part.tokens]
            whole.logprobs = [entry for part in parts for entry in part.logprobs]
        results.append(whole)
    return results


def reported_rows(raw: torch.Tensor, z: torch.Tensor, rows: Sequence[RowSpec]) -> torch.Tensor:
    """The logits [r, V] of the log-probabilities of one request's rows. raw, z: before and after a caller's processors."""
    mode = rows[0].params.logprobs_mode
    return raw if mode == "raw" else process(z, rows, EDITS if mode == "masked" else STAGES)


def process(logits: torch.Tensor, rows: Sequence[RowSpec], stages: Sequence[Stage] = STAGES) -> torch.Tensor:
    """The processed logits [r, V] of the draw, -inf outside the kept set; for greedy rows, after penalties.

    Their softmax is the distribution of the draw, as the rejection rule needs it. A row that `sample` refuses is NaN, or all
    -inf if every token is masked.
    """
    z = logits.float()
    good = [i for i, fault in enumerate(_faults(z, rows)) if not fault]
    out = torch.full_like(z, math.nan)
    for members in _groups(rows, good, _at_once(z)):
        out[members] = filters.expand(*run_stages(z[members], [rows[i] for i in members], stages), z.shape[-1])
    return out


def draw(
    z: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    purposes: torch.Tensor | int = Purpose.TARGET,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """argmax of processed logits z [n, m] + noise, of equals the lowest id -> token ids [n].

    keys [n, 2], positions [n]. ids [n, m]: the columns' token ids, ascending; None: 0 .. m-1.
    """
    noise = gumbel_at(keys, positions, z.shape[-1] if ids is None else ids, purposes)
    best = (z + noise).argmax(-1)
    return best if ids is None else ids.gather(-1, best[:, None])[:, 0]


def _at_once(z: torch.Tensor) -> int:
    """Rows to process together."""
    return max(1, (CPU_WORK if z.device.type == "cpu" else GPU_WORK) // z.shape[-1])


def _groups(rows: Sequence[RowSpec], members: Iterable[int], size: int) -> list[list[int]]:
    """The row numbers `members` in groups of up to `size` that need the same stages and kind of log-probability."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i in members:
        params = rows[i].params
        need = (params.greedy, _report_of(params), needs(params))
        groups.setdefault(need, []).append(i)
    return [group[at : at + size] for group in groups.values() for at in range(0, len(group), size)]


def _report_of(params: SamplingParams) -> str:
    return "" if params.logprobs is None else params.logprobs_mode


def _sample_group(z: torch.Tensor, raw: torch.Tensor, rows: Sequence[RowSpec], members: list[int]) -> list[RowResult]:
    chosen = [rows[i] for i in members]
    processed, ids = run_stages(_take(z, members), chosen)
    tokens = _draw_rows(processed, ids, chosen)
    match _report_of(chosen[0].params):
        case "raw":
            logprobs = _logprobs(_take(raw, members), None, chosen, tokens)
        case "masked":
            logprobs = _logprobs(run_stages(_take(z, members), chosen, EDITS)[0], None, chosen, tokens)
        case "processed":
            logprobs = _logprobs(processed, ids, chosen, tokens)
        case _:
            logprobs = [[] for _ in members]
    mus = _mirostat_states(_take(z, members), chosen, tokens) if chosen[0].params.mirostat_tau else [[] for _ in members]
    faults = [_fault_after(best) for best in processed.amax(-1).tolist()]
    return [
        RowResult(error=fault) if fault else RowResult(drawn, reported, states)
        for fault, drawn, reported, states in zip(faults, tokens, logprobs, mus, strict=True)
    ]


def _mirostat_states(z: torch.Tensor, rows: list[RowSpec], tokens: list[list[int]]) -> list[list[float]]:
    """Mirostat's state after each token; the surprise is measured before any token is cut off.

    Source: Basu et al., "Mirostat", arXiv 2007.14966.
    """
    open_rows = [replace(row, mu=math.inf) for row in rows]
    z, ids = run_stages(z, open_rows)
    assert ids is None, "mirostat goes with no filter"
    norm = (z.amax(-1, keepdim=True) + filters.log_total(z)).squeeze(-1).tolist()
    states = []
    for i, (row, drawn) in enumerate(zip(rows, tokens, strict=True)):
        params, mu = row.params, allowed_surprise(row)
        surprises = [(norm[i] - float(z[i, token])) / filters.LN2 for token in drawn]
        states.append([mu - params.mirostat_eta * (bits - params.mirostat_tau) for bits in surprises])
    return states


def _take(z: torch.Tensor, members: list[int]) -> torch.Tensor:
    return z if members == list(range(len(z))) else z[members]


def _draw_rows(z: torch.Tensor, ids: torch.Tensor | None, rows: list[RowSpec]) -> list[list[int]]:
    """The tokens of rows of one group, one for each key."""
    counts = [len(row.keys) for row in rows]
    if rows[0].params.greedy:
        return [[token] * n for token, n in zip(z.argmax(-1).tolist(), counts, strict=True)]
    z, ids = filters.compact(filters.reachable(z), ids)
    whose = torch.tensor([i for i, n in enumerate(counts) for _ in range(n)], dtype=torch.int64, device=z.device)
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
    """Log-probabilities of each row's tokens under logits z [r, m], whose columns are the tokens `ids`."""
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
    """Why each row cannot be drawn from; empty if it can."""
    faults = []
    for best, row in zip(z.amax(-1).tolist(), rows, strict=True):
        fault = "" if abs(best) <= LARGEST else f"the model's logits are broken: the largest is {best}"
        try:
            check_ids(row, z.shape[-1])
        except ValueError as error:
            fault = fault or str(error)
        faults.append(fault)
    return faults


def _fault_after(best: float) -> str:
    if best > -math.inf:
        return ""
    return (
        "no token can be drawn: allowed_token_ids, structured_outputs, bad_words, logit_bias, min_tokens and "
        "no_repeat_ngram together rule out every one; relax one of them"
    )
