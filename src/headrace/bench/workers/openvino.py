"""OpenVINO GenAI: the GGUF file it reads itself, through its continuous-batching pipeline, step by step.

Setting: device properties, as {"INFERENCE_PRECISION_HINT": "f32"}; none is the default precision.
"""

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = -(-int(kv_bytes) >> 30) + 1  # GB
        scheduler.max_num_batched_tokens = 4096  # a prompt in one piece
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, **setting}
        self.pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.requests = 0
        self.about = f"OpenVINO GenAI {genai.__version__}"

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

    def add(self, prompt: list[int], config: Any) -> Any:
        self.requests += 1
        return self.pipeline.add_request(self.requests, openvino.Tensor(np.array([prompt], np.int64)), config)

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
