"""What the OpenVINO workers share: its continuous-batching pipeline, and how requests come into it."""

from typing import Any

import numpy as np
import openvino
import openvino_genai as genai


class Pipeline:
    """`properties`: of the device; without any it runs in its default precision."""

    def __init__(self, model: str, threads: int, kv_bytes: float, **properties: Any) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = -(-int(kv_bytes) >> 30) + 1  # GB
        scheduler.max_num_batched_tokens = 4096  # a prompt in one piece
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads, **properties}
        self.pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.requests = 0
        self.about = f"OpenVINO GenAI {genai.__version__}"

    def add(self, prompt: list[int], config: Any) -> Any:
        """The handle of a new request."""
        self.requests += 1
        return self.pipeline.add_request(self.requests, openvino.Tensor(np.array([prompt], np.int64)), config)
