"""Run requests to their end and count the KV blocks that they hold in each step."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.data.explicit import Params
from headrace.data.outputs import RequestOutput
from headrace.data.types import Request
from headrace.llm import LLM


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
