"""OpenVINO GenAI's speculative decoding and prompt lookup, in its continuous-batching pipeline.

Setting: {"draft": a GGUF file} or {"draft": ""} for prompt lookup. Options of a question: fields of its GenerationConfig.
"""

import runpy
import time
from pathlib import Path
from typing import Any

import openvino_genai as genai

Pipeline: Any = runpy.run_path(str(Path(__file__).with_name("openvino_pipeline.py")))["Pipeline"]


class Worker(Pipeline):
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        if setting["draft"]:
            helper = {"draft_model": genai.draft_model(setting["draft"], "CPU", INFERENCE_NUM_THREADS=threads)}
        else:
            helper = {"prompt_lookup": True}
        super().__init__(model, threads, kv_bytes, **helper)

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

    def step(self, handles: list[Any], made: list[list[int]]) -> None:
        self.pipeline.step()
        for handle, ids in zip(handles, made, strict=True):
            while handle.can_read():
                ids += next(iter(handle.read().values())).generated_ids
