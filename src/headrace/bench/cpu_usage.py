"""Running requests to their end, and counting the blocks they hold on the way."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.data.explicit import Params
from headrace.data.outputs import RequestOutput
from headrace.data.types import Request
from headrace.llm import LLM


@dataclass(slots=True)
class Watched:
    """What came of requests that ran together. Block counts are sums over steps, of each request alone: what two requests
    share counts twice. `peak`: the most blocks of each request at once."""

    outputs: list[RequestOutput]
    seconds: float = 0.0
    steps: int = 0
    shared: int = 0  # blocks held
    unshared: int = 0  # blocks that each sequence would hold if it had its own
    peak: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        return sum(len(one.token_ids) for output in self.outputs for one in output.outputs)

    @property
    def saved(self) -> float:
        """The share of blocks that sharing saves."""
        return 1 - self.shared / self.unshared if self.unshared else 0.0

    def count(self, request: Request) -> None:
        tables = [seq.kv.tables[0] for seq in request.seqs]
        blocks = len({block for table in tables for block in table})
        self.shared += blocks
        self.unshared += sum(map(len, tables))
        self.peak[request.id] = max(self.peak[request.id], blocks)


def watch(llm: LLM, prompts: list[list[int]], params: Params | Sequence[Params]) -> Watched:
    """Run prompts together, with parameters for all or one each. Raises ValueError if one fails."""
    each = [params] * len(prompts) if isinstance(params, Params) else params
    start = time.perf_counter()
    found = Watched([llm.add(prompt, one) for prompt, one in zip(prompts, each, strict=True)])
    while not all(output.finished for output in found.outputs):
        llm.step()
        found.steps += 1
        for request in llm.engine.scheduler.running:
            found.count(request)
    found.seconds = time.perf_counter() - start
    for output in found.outputs:
        if output.error is not None:
            raise ValueError(output.error)
    return found
