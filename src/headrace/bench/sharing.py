"""KV blocks of parallel samples and of beams, with and without sharing, on the same prompts.

Published for Alpaca lengths: parallel samples save 6 to 10 %, beams 38 to 55 %; for ShareGPT 16 to 30 % and 44 to 66 %
(Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023, figure 15).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.bench.block_usage import run_requests
from headrace.bench.figures import Column
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.llm import LLM

WIDTHS = (2, 4, 6)
COLUMNS = (
    Column("method", "{0.method}"),
    Column("width", "{0.width}"),
    Column("blocks unshared", "{0.unshared:.1f}"),
    Column("blocks shared", "{0.shared:.1f}"),
    Column("saved", "{0.saved:.1%}"),
)


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """Mean blocks of one request in one step, without and with sharing, for `width` samples or beams."""

    method: str
    width: int
    unshared: float
    shared: float
    saved: float


def measure(llm: LLM, prompts: Sequence[list[int]], max_tokens: int, widths: Sequence[int] = WIDTHS) -> list[SharedBlocks]:
    """Run each prompt alone with n samples and with n beams, for every n of `widths`."""
    rows = []
    for method in ("parallel", "beam"):
        for width in widths:
            params: SamplingParams | BeamSearchParams = SamplingParams(n=width, seed=0, max_tokens=max_tokens)
            if method == "beam":
                params = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
            usages = [run_requests(llm, [prompt], params) for prompt in prompts]
            steps = sum(usage.steps for usage in usages)
            unshared, shared = sum(usage.unshared for usage in usages), sum(usage.shared for usage in usages)
            rows.append(SharedBlocks(method, width, unshared / steps, shared / steps, 1 - shared / max(unshared, 1)))
    return rows
