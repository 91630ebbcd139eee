"""Decoding methods side by side on the same prompts: speed, repetition, blocks."""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.cpu_usage import Watched, watch
from headrace.bench.repetition import distinct, rep
from headrace.data.explicit import params_of
from headrace.data.params import SamplingParams
from headrace.llm import LLM

# Methods by name, as fields of a request; a number at the end of beam, best and diverse is the width.
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
COLUMNS = ("mode", "prompt", "text", "tokens", "tokens_per_s", "rep_4", "distinct_4", "blocks", "finish_reason")


@dataclass(slots=True)
class Compared:
    """One method's figures over all prompts; `rep_4` is the mean over its outputs, `blocks` the mean peak of a request."""

    mode: str
    found: Watched

    @property
    def outputs(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.found.outputs]

    @property
    def tokens_per_s(self) -> float:
        """Of the outputs that are given back."""
        return sum(map(len, self.outputs)) / self.found.seconds

    @property
    def rep_4(self) -> float:
        return sum(map(rep, self.outputs)) / len(self.outputs)

    @property
    def distinct_4(self) -> float:
        return distinct(self.outputs)

    @property
    def blocks(self) -> float:
        return sum(self.found.peak.values()) / len(self.outputs)

    def rows(self) -> list[tuple[Any, ...]]:
        """A line of the CSV for every prompt; its `tokens_per_s` is that of the method, which ran all prompts together."""
        speed = round(self.tokens_per_s, 2)
        return [
            (
                self.mode,
                number,
                one.text,
                len(one.token_ids),
                speed,
                round(rep(one.token_ids), 4),
                round(distinct([one.token_ids]), 4),
                self.found.peak[output.request_id],
                one.finish_reason,
            )
            for number, output in enumerate(self.found.outputs)
            for one in output.outputs[:1]
        ]


def mode(name: str, max_tokens: int, seed: int) -> SamplingParams:
    """The parameters of a method's name. Raises ValueError for an unknown one."""
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
) -> list[Compared]:
    """Each method on all prompts, one method after the other. `max_tokens`: of all answers, or of each prompt's."""
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    return [Compared(name, watch(llm, list(prompts), [mode(name, most, seed) for most in limits])) for name in names]


def write_csv(path: Path, compared: Sequence[Compared]) -> None:
    """One line for each method and prompt."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for one in compared:
            writer.writerows(one.rows())
