"""Embeddings of token sequences by one engine, named in the setting: `headrace`, `torch` or `llama.cpp`. First row, normalised.

`run` returns the first 64 numbers of each vector in place of first tokens. The setting of llama.cpp has `together`: all texts
in one batch, otherwise each alone.
"""

import ctypes
import time
from importlib.metadata import version
from typing import Any

import numpy as np

Vectors = list[list[float]]
SHOWN = 64  # numbers of a vector


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        engine: Any = {"headrace": Headrace, "torch": Torch, "llama.cpp": LlamaCpp}[setting["engine"]]
        self.engine = engine(model, threads, setting)
        self.about = self.engine.about

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, Vectors]:
        start = time.perf_counter()
        vectors = self.engine.vectors(prompts)
        seconds = time.perf_counter() - start
        return seconds, 0.0, [[float(number) for number in vector[:SHOWN]] for vector in vectors]


class Headrace:
    def __init__(self, model: str, threads: int, setting: dict[str, Any]) -> None:
        from headrace import LLM, __version__

        tokens = setting["tokens"]
        self.llm = LLM(
            model, threads=threads, backend="native", device="cpu", max_model_len=tokens, max_num_batched_tokens=2048
        )
        self.about = f"headrace {__version__}"

    def vectors(self, prompts: list[list[int]]) -> Any:
        return [output.values for output in self.llm.embed(prompts, pooling="first")]


class Torch:
    def __init__(self, model: str, threads: int, setting: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = transformers.AutoModel.from_pretrained(model, add_pooling_layer=False, dtype=torch.float32).eval()
        self.about = f"torch {torch.__version__}, transformers {transformers.__version__}, float32"

    def vectors(self, prompts: list[list[int]]) -> Any:
        with self.torch.inference_mode():
            rows = self.model(self.torch.tensor(prompts)).last_hidden_state[:, 0]
            return self.torch.nn.functional.normalize(rows, dim=-1).tolist()


class LlamaCpp:
    def __init__(self, model: str, threads: int, setting: dict[str, Any]) -> None:
        import llama_cpp

        self.llama, self.setting = llama_cpp, setting
        room = setting["tokens"] * setting["texts"]
        self.model = llama_cpp.Llama(
            model,
            embedding=True,
            pooling_type=llama_cpp.LLAMA_POOLING_TYPE_CLS,
            n_ctx=room,
            n_batch=room,
            n_ubatch=room,
            n_threads=threads,
            n_threads_batch=threads,
            n_seq_max=setting["texts"],
            verbose=False,
        )
        features = llama_cpp.llama_print_system_info().decode().replace(" = 1", "").replace(" | ", " ").strip()
        self.about = f"llama-cpp-python {version('llama_cpp_python')} ({features})"

    def vectors(self, prompts: list[list[int]]) -> Any:
        if self.setting["together"]:
            return self._batch(prompts)
        return [vector for prompt in prompts for vector in self._batch([prompt])]

    def _batch(self, prompts: list[list[int]]) -> Any:
        context, batch, width = self.model._ctx, self.model._batch, self.model.n_embd()
        context.kv_cache_clear()
        batch.reset()
        for number, prompt in enumerate(prompts):
            batch.add_sequence(prompt, number, True)
        context.decode(batch)
        rows = [self.llama.llama_get_embeddings_seq(self.model.ctx, number) for number in range(len(prompts))]
        vectors = [np.ctypeslib.as_array(ctypes.cast(row, ctypes.POINTER(ctypes.c_float)), (width,)).copy() for row in rows]
        return [vector / np.linalg.norm(vector) for vector in vectors]
