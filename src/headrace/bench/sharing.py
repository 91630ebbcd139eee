"""KV blocks of parallel samples and of beams, with and without sharing, on the same prompts.

Published for Alpaca lengths: parallel samples save 6 to 10 %, beams 38 to 55 %; for ShareGPT 16 to 30 % and 44 to 66 %
(Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023, figure 15).
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.bench.figures import Column
from headrace.data.explicit import Params
from headrace.data.outputs import RequestOutput
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.data.types import Request
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


@dataclass(slots=True)
class BlockUsage:
    """Outputs of requests that ran together, and their block counts.

    `shared` (blocks held) and `unshared` (blocks if every sequence had its own) are sums over steps and requests; a block of
    two requests counts twice. `peak`: the most blocks of each request at once, by request id.
    """

    outputs: list[RequestOutput]
    seconds: float = 0.0
    steps: int = 0
    shared: int = 0
    unshared: int = 0
    peak: Counter[str] = field(default_factory=Counter)

    @property
    def saved(self) -> float:
        """Share of the blocks that sharing saves, 0 to 1."""
        return 1 - self.shared / self.unshared if self.unshared else 0.0

    def count(self, request: Request) -> None:
        """Add the blocks that a request holds now."""
        tables = [seq.kv.tables[0] for seq in request.seqs]
        blocks = len({block for table in tables for block in table})
        self.shared += blocks
        self.unshared += sum(map(len, tables))
        self.peak[request.id] = max(self.peak[request.id], blocks)


def run_requests(llm: LLM, prompts: list[list[int]], params: Params | Sequence[Params]) -> BlockUsage:
    """Run prompts together, with parameters for all or one each. Raises ValueError if a request fails."""
    by_prompt = [params] * len(prompts) if isinstance(params, Params) else params
    start = time.perf_counter()
    usage = BlockUsage([llm.add(*pair) for pair in zip(prompts, by_prompt, strict=True)])
    while not all(output.finished for output in usage.outputs):
        llm.step()
        usage.steps += 1
        for request in llm.engine.scheduler.running:
            usage.count(request)
    usage.seconds = time.perf_counter() - start
    for output in usage.outputs:
        if output.error is not None:
            raise ValueError(output.error)
    return usage
