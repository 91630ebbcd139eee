"""Blocks of KV memory with and without sharing: parallel samples and beams on the same prompts.

Published, on Alpaca lengths: 6 to 10 % saved by parallel samples, 38 to 55 % by beams; on ShareGPT 16 to 30 % and 44 to 66 %
(Kwon et al., 2023, figure 15).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.bench.cpu_usage import watch
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.llm import LLM

WIDTHS = (2, 4, 6)


@dataclass(frozen=True, slots=True)
class Row:
    """Mean blocks of one request in one step, if every sequence had its own and as they are."""

    method: str
    width: int
    unshared: float
    shared: float
    saved: float


def measure(llm: LLM, prompts: Sequence[list[int]], max_tokens: int, widths: Sequence[int] = WIDTHS) -> list[Row]:
    """A row for n samples and for n beams, for every n."""
    rows = []
    for method in ("parallel", "beam"):
        for width in widths:
            params: SamplingParams | BeamSearchParams = SamplingParams(n=width, seed=0, max_tokens=max_tokens)
            if method == "beam":
                params = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
            found = [watch(llm, [prompt], params) for prompt in prompts]
            steps = sum(one.steps for one in found)
            unshared, shared = sum(one.unshared for one in found), sum(one.shared for one in found)
            rows.append(Row(method, width, unshared / steps, shared / steps, 1 - shared / max(unshared, 1)))
    return rows
