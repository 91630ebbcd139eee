"""Worker for Headrace: engine steps over random prompts, without prefix caching.

Setting: arguments of LLM, as {"backend": "native"}. It also runs in older builds of Headrace (`bench local --beside`), so it
uses only names that they have.
"""

import random
import time
from typing import Any

import headrace
from headrace import LLM, SamplingParams

# Older builds have it in this module too.
from headrace.drafting.speculation import Draft, Speculation

# Tokens that the first sequences of a batch may emit while the last ones are still in prefill.
SLACK = 64


class RandomDrafter:
    """Drafter of random tokens: every step is a verification in which all drafted tokens are rejected."""

    name = "wrong"

    def __init__(self, llm: LLM) -> None:
        self.vocab_size = llm.model_config.vocab_size
        self.random = random.Random(0)

    def draft(self, request: Any, seq: Any, most: int) -> Draft:
        return Draft([self.random.randrange(self.vocab_size) for _ in range(most)], list(range(-1, most - 1)))


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        self.llm = LLM(model, threads=threads, kv_cache_memory=int(kv_bytes), **{"enable_prefix_caching": False, **setting})
        self.about = f"Headrace, {self.llm.backend} back end"
        self.build = {"version": headrace.__version__, "file": headrace.__file__}

    def run(self, prompts: list[list[int]], new_tokens: int, fed: int = 1) -> tuple[float, float, list[int]]:
        engine = self.llm.engine
        engine.speculation = (
            Speculation([RandomDrafter(self.llm)], self.llm.memory_plan.max_model_len, fed - 1) if fed > 1 else None
        )
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens + SLACK if new_tokens else 1, ignore_eos=True)
        first: dict[str, int] = {}
        start = time.perf_counter()
        requests = [engine.add(prompt, params) for prompt in prompts]
        while len(first) < len(requests):
            for delta in engine.step():
                if delta.error:
                    raise RuntimeError(delta.error)
                if delta.token_ids:
                    first.setdefault(delta.request_id, delta.token_ids[0])
        prefilled = time.perf_counter()
        total = remaining = len(requests) * new_tokens
        while remaining > 0:
            deltas = engine.step()
            # With drafts, count steps: `new_tokens` for each sequence.
            remaining -= sum(len(delta.token_ids) for delta in deltas) if fed == 1 else len(requests)
        decoded = time.perf_counter()
        for request in requests:
            engine.abort(request.id)
        while engine.busy:
            engine.step()
        seconds = (decoded - prefilled) * total / (total - remaining) if total else 0.0
        return prefilled - start, seconds, [first[request.id] for request in requests]
