"""Compare decoding methods on the same prompts: speed, repetition of the texts (n-grams of tokens), KV blocks."""

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.figures import Column
from headrace.bench.sharing import BlockUsage, run_requests
from headrace.data.explicit import params_of
from headrace.data.params import SamplingParams
from headrace.llm import LLM

# Methods by name, as fields of a request. A number at the end of beam, best and diverse is the width.
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sample": {"temperature": 1.0},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "mirostat": {"mirostat_tau": 5.0},
    "dry": {"temperature": 0.0, "dry_multiplier": 0.8},
    "xtc": {"xtc_probability": 0.5, "min_p": 0.02},
    "beam": {"beam_width": 4},
    "diverse": {"beam_width": 4, "beam_groups": 2, "diversity_penalty": 0.5},
    "best": {"best_of": 4, "temperature": 1.0},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4, "temperature": 0.0},
    "contrastive-decoding": {"contrastive_beta": 0.5, "temperature": 0.0},
}
WIDTHS = {"beam": "beam_width", "diverse": "beam_width", "best": "best_of"}
CSV_COLUMNS = ("mode", "prompt", "text", "tokens", "tokens_per_s", "rep_4", "distinct_4", "blocks", "finish_reason")
COLUMNS = (
    Column("method", "{0.mode}"),
    Column("tokens/s", "{0.tokens_per_s:.1f}"),
    Column("rep-4", "{0.rep_4:.3f}"),
    Column("distinct-4", "{0.distinct_4:.3f}"),
    Column("blocks", "{0.blocks:.1f}"),
    Column("saved by sharing", "{0.usage.saved:.1%}"),
    Column("tokens", lambda result: sum(map(len, result.outputs))),
)
Tokens = Sequence[int]


@dataclass(slots=True)
class MethodResult:
    """Outputs and figures of one decoding method. `rep_4`: mean over the outputs; `blocks`: mean of the requests' peaks."""

    mode: str
    usage: BlockUsage

    @property
    def outputs(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.usage.outputs]

    @property
    def tokens_per_s(self) -> float:
        """Of the returned outputs; a best-of method computes more tokens."""
        return sum(map(len, self.outputs)) / self.usage.seconds

    @property
    def rep_4(self) -> float:
        return sum(map(rep, self.outputs)) / len(self.outputs)

    @property
    def distinct_4(self) -> float:
        return distinct(self.outputs)

    @property
    def blocks(self) -> float:
        return sum(self.usage.peak.values()) / len(self.outputs)

    def rows(self) -> list[tuple[Any, ...]]:
        """CSV rows, one for each prompt. `tokens_per_s` is that of the method, which runs all prompts together."""
        speed = round(self.tokens_per_s, 2)
        return [
            (
                self.mode,
                number,
                answer.text,
                len(answer.token_ids),
                speed,
                round(rep(answer.token_ids), 4),
                round(distinct([answer.token_ids]), 4),
                self.usage.peak[output.request_id],
                answer.finish_reason,
            )
            for number, output in enumerate(self.usage.outputs)
            for answer in output.outputs[:1]
        ]


def mode(name: str, max_tokens: int, seed: int) -> SamplingParams:
    """Parameters of the method with this name. Raises ValueError for an unknown name."""
    known = name
    fields = dict(MODES.get(name, {}))
    numbered = re.fullmatch(r"(beam|diverse|best)(\d{1,2})", name)
    if numbered:
        known = numbered[1]
        fields = {**MODES[known], WIDTHS[known]: int(numbered[2])}
    if known not in MODES:
        raise ValueError(f"there is no method {name!r}; choose from {', '.join(MODES)} (beam, diverse and best take a number)")
    if "beam_width" not in fields:
        fields["seed"] = seed
    return params_of({**fields, "max_tokens": max_tokens})


def compare(
    llm: LLM, prompts: Sequence[list[int]], names: Sequence[str], max_tokens: int | Sequence[int], seed: int = 0
) -> list[MethodResult]:
    """Run all prompts with each method, one method after the other. max_tokens: of all answers, or one number a prompt."""
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    return [MethodResult(name, run_requests(llm, list(prompts), [mode(name, most, seed) for most in limits])) for name in names]


def write_csv(path: Path, results: Sequence[MethodResult]) -> None:
    """Write one line for each method and prompt."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for result in results:
            writer.writerows(result.rows())


def ngrams(tokens: Tokens, n: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def rep(tokens: Tokens, n: int = 4) -> float:
    """Share of n-grams that occur earlier in the same text, 0 for short texts (seq-rep-n of Welleck et al., 2020)."""
    grams = ngrams(tokens, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(texts: Iterable[Tokens], n: int = 4) -> float:
    """Distinct n-grams divided by all n-grams of all texts together, 1 if there are none (Li et al., 2016)."""
    grams = [gram for tokens in texts for gram in ngrams(tokens, n)]
    return len(set(grams)) / len(grams) if grams else 1.0
