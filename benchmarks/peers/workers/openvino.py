"""OpenVINO GenAI: the GGUF file it reads itself, through its continuous-batching pipeline, step by step.

Setting: device properties, as {"INFERENCE_PRECISION_HINT": "f32"}; none is the default precision.
"""

import runpy
import time
from pathlib import Path
from typing import Any

import openvino_genai as genai

Pipeline: Any = runpy.run_path(str(Path(__file__).with_name("openvino_pipeline.py")))["Pipeline"]


class Worker(Pipeline):
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        super().__init__(model, threads, kv_bytes, **setting)

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens = new_tokens + 1
        config.do_sample = False
        config.ignore_eos = True
        start = time.perf_counter()
        handles = [self.add(prompt, config) for prompt in prompts]
        first = self.advance(handles, 1)
        prefilled = time.perf_counter()
        self.advance(handles, new_tokens)
        decoded = time.perf_counter()
        while self.pipeline.has_non_finished_requests():  # none, unless a sequence stopped early
            self.pipeline.step()
        return prefilled - start, decoded - prefilled, first

    def advance(self, handles: list[Any], tokens: int) -> list[int]:
        """Step until every request has so many tokens more; the first of them."""
        counts, first = [0] * len(handles), [0] * len(handles)
        while min(counts) < tokens:
            self.pipeline.step()
            for i, handle in enumerate(handles):
                if handle.can_read():
                    made = next(iter(handle.read().values())).generated_ids
                    first[i] = first[i] if counts[i] else made[0]
                    counts[i] += len(made)
        return first
