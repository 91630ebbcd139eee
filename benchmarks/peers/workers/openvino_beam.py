"""OpenVINO GenAI's beam search, in its continuous-batching pipeline.

Setting: {"beams": 4}, and device properties.
"""

import runpy
import time
from pathlib import Path
from typing import Any

import openvino_genai as genai

Pipeline: Any = runpy.run_path(str(Path(__file__).with_name("openvino_pipeline.py")))["Pipeline"]


class Worker(Pipeline):
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        options = dict(setting)
        self.beams = options.pop("beams")
        super().__init__(model, threads, kv_bytes, **options)

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
