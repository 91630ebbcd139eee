"""Headrace's beam search, or as many independent greedy sequences as there are beams.

Setting: {"beams": 4, "independent": false}, and arguments of LLM.
"""

import time
from typing import Any

from headrace import LLM, BeamSearchParams, SamplingParams


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        options = dict(setting)
        self.beams, self.independent = options.pop("beams"), options.pop("independent", False)
        self.llm = LLM(model, threads=threads, kv_cache_memory=int(kv_bytes), **options)
        self.about = f"Headrace, {self.llm.backend} back end"

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[int]]:
        """No time of prefill is told apart: beams answer at the end."""
        params: Any = BeamSearchParams(beam_width=self.beams, max_tokens=new_tokens, ignore_eos=True)
        if self.independent:
            params = SamplingParams(n=self.beams, temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        return 0.0, time.perf_counter() - start, [output.outputs[0].token_ids[0] for output in outputs]
