"""Headrace itself, measured as the other engines are: engine steps over random prompts, of which none finds another's prefix.

Setting: arguments of LLM, as {"backend": "native"}. Runs another build of Headrace too, so that it uses of it what is old.
"""

import random
import time
from typing import Any

import headrace
from headrace import LLM, SamplingParams

# From here, as builds from before the rooms have it here too: this file also runs in theirs (bench local --beside).
from headrace.drafting.speculation import Draft, Speculation

SLACK = 64  # tokens that early sequences of a batch may make while the last ones are still in prefill


class Wrong:
    """Drafts chains of random tokens: every step is one of verification, and nothing is gained."""

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
        engine.speculation = Speculation([Wrong(self.llm)], self.llm.memory_plan.max_model_len, fed - 1) if fed > 1 else None
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
        wanted = made = len(requests) * new_tokens
        while made > 0:
            deltas = engine.step()
            made -= sum(len(delta.token_ids) for delta in deltas) if fed == 1 else len(requests)  # or one step of each
        decoded = time.perf_counter()
        for request in requests:
            engine.abort(request.id)
        while engine.busy:
            engine.step()
        seconds = (decoded - prefilled) * wanted / (wanted - made) if wanted else 0.0
        return prefilled - start, seconds, [first[request.id] for request in requests]
