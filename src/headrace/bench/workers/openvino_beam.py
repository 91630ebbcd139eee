"""OpenVINO GenAI's beam search, in its continuous-batching pipeline.

Setting: {"beams": 4}, and device properties.
"""

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        options = dict(setting)
        self.beams = options.pop("beams")
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = -(-int(kv_bytes) >> 30) + 1  # GB
        scheduler.max_num_batched_tokens = 4096  # a prompt in one piece
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, **options}
        self.pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.requests = 0
        self.about = f"OpenVINO GenAI {genai.__version__}"

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[int]]:
        config = genai.GenerationConfig()
        config.num_beams = self.beams
        config.num_return_sequences = 1
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        start = time.perf_counter()
        handles = [self.add(prompt, config) for prompt in prompts]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        seconds = time.perf_counter() - start
        outputs = [max(handle.read_all(), key=lambda output: output.score).generated_ids for handle in handles]
        if any(len(ids) != new_tokens for ids in outputs):
            raise RuntimeError(f"{new_tokens} tokens were asked for, {[len(ids) for ids in outputs]} came")
        return 0.0, seconds, [ids[0] for ids in outputs]

    def add(self, prompt: list[int], config: Any) -> Any:
        self.requests += 1
        return self.pipeline.add_request(self.requests, openvino.Tensor(np.array([prompt], np.int64)), config)
