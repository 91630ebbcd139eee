"""ONNX Runtime GenAI: a model folder made by its own builder, through Generator; all prompts of a cell are one batch.

Setting: entries of the session options in genai_config.json. A minimum length keeps every sequence from ending early.
"""

import json
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import onnxruntime_genai as genai


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        config = genai.Config(model)
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1, **setting}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = genai.Model(config)
        self.about = f"ONNX Runtime GenAI {version('onnxruntime-genai')}, ONNX Runtime {version('onnxruntime')}"

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[int]]:
        params = genai.GeneratorParams(self.model)
        length = len(prompts[0]) + new_tokens + 1
        params.set_search_options(do_sample=False, batch_size=len(prompts), max_length=length, min_length=length)
        generator = genai.Generator(self.model, params)
        start = time.perf_counter()
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        prefilled = time.perf_counter()
        for _ in range(new_tokens):
            generator.generate_next_token()
        decoded = time.perf_counter()
        made = [generator.get_sequence(i)[len(prompts[0]) :] for i in range(len(prompts))]
        if any(len(tokens) != new_tokens + 1 for tokens in made):
            raise RuntimeError(f"asked for {new_tokens + 1} tokens, got {[len(tokens) for tokens in made]}")
        return prefilled - start, decoded - prefilled, [int(tokens[0]) for tokens in made]
