"""vLLM on the CPU: a Hugging Face folder in bfloat16, its engine driven step by step in this process.

Setting: arguments of vllm.LLM, as {"enforce_eager": true}.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vllm

LONGEST = 8192  # tokens of a sequence, above every cell
SLACK = 64  # tokens that early sequences of a batch may make while the last ones are still in prefill


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, as the other engines are
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(-(-int(kv_bytes) >> 30) + 1)  # GiB
        known = json.loads((Path(model) / "config.json").read_text())["max_position_embeddings"]
        self.llm = vllm.LLM(
            model=model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=32,
            max_num_batched_tokens=4096,
            max_model_len=min(LONGEST, known),
            **setting,
        )
        self.requests = 0
        self.about = f"vLLM {vllm.__version__} CPU, bfloat16"

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[int]]:
        engine = self.llm.llm_engine
        most = new_tokens + SLACK if new_tokens else 1
        params = vllm.SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        ids = [self.add(engine, prompt, params) for prompt in prompts]
        made, first = dict.fromkeys(ids, 0), dict.fromkeys(ids, 0)
        self.advance(engine, made, first, lambda: all(made.values()))
        prefilled = time.perf_counter()
        before = sum(made.values())
        self.advance(engine, made, first, lambda: sum(made.values()) >= before + new_tokens * len(ids))
        decoded = time.perf_counter()
        engine.abort_request(ids)
        while engine.has_unfinished_requests():
            engine.step()
        return prefilled - start, decoded - prefilled, [first[name] for name in ids]

    def add(self, engine: Any, prompt: list[int], params: Any) -> str:
        self.requests += 1
        name = str(self.requests)
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def advance(self, engine: Any, made: dict[str, int], first: dict[str, int], done: Callable[[], bool]) -> None:
        """Step until `done`; `made` counts each request's tokens, `first` keeps its first one."""
        while not done():
            for output in engine.step():
                tokens = output.outputs[0].token_ids
                made[output.request_id], first[output.request_id] = len(tokens), tokens[0]
