"""Headrace with speculation as a person has it, one prompt after the other. Setting: arguments of LLM, as {"draft": …}."""

import time
from typing import Any

from headrace import LLM, SamplingParams


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        self.llm = LLM(model, threads=threads, kv_cache_memory=int(kv_bytes), enable_prefix_caching=False, **setting)
        self.about = f"Headrace, {self.llm.backend} back end"

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[int], int]:
        engine = self.llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens + 1)
        start = time.perf_counter()
        made: dict[str, list[int]] = {engine.add(prompt, params).id: [] for prompt in prompts}
        while not all(made.values()):
            self.step(made)
        prefilled, before = time.perf_counter(), sum(map(len, made.values()))
        while engine.busy:
            self.step(made)
        seconds = time.perf_counter() - prefilled
        return prefilled - start, seconds, [ids[0] for ids in made.values()], sum(map(len, made.values())) - before

    def step(self, made: dict[str, list[int]]) -> None:
        for delta in self.llm.engine.step():
            if delta.error:
                raise RuntimeError(delta.error)
            made[delta.request_id] += delta.token_ids
