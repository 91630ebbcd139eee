"""OpenVINO GenAI's speculative decoding and prompt lookup, in its continuous-batching pipeline.

Setting: {"draft": a GGUF file} or {"draft": ""} for prompt lookup. Options of a question: fields of its GenerationConfig.
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
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if setting["draft"]:
            properties["draft_model"] = genai.draft_model(setting["draft"], "CPU", INFERENCE_NUM_THREADS=threads)
        else:
            properties["prompt_lookup"] = True
        self.pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.requests = 0
        self.about = f"OpenVINO GenAI {genai.__version__}"

    def run(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> tuple[float, float, list[int], int]:
        config = genai.GenerationConfig()
        config.max_new_tokens = new_tokens + 1
        config.do_sample = False
        config.eos_token_id = self.pipeline.get_tokenizer().get_eos_token_id()
        for name, value in options.items():
            setattr(config, name, value)
        start = time.perf_counter()
        handles = [self.add(prompt, config) for prompt in prompts]
        made: list[list[int]] = [[] for _ in handles]
        while not all(made):
            self.step(handles, made)
        prefilled, before = time.perf_counter(), sum(map(len, made))
        while self.pipeline.has_non_finished_requests():
            self.step(handles, made)
        seconds = time.perf_counter() - prefilled
        return prefilled - start, seconds, [ids[0] for ids in made], sum(map(len, made)) - before

    def add(self, prompt: list[int], config: Any) -> Any:
        self.requests += 1
        return self.pipeline.add_request(self.requests, openvino.Tensor(np.array([prompt], np.int64)), config)

    def step(self, handles: list[Any], made: list[list[int]]) -> None:
        self.pipeline.step()
        for handle, ids in zip(handles, made, strict=True):
            while handle.can_read():
                ids += next(iter(handle.read().values())).generated_ids
