"""llama.cpp through its C API: one llama_batch for every step, all sequences in it; greedy by argmax over the logits.

Settings: `flash_attention` (bool), `ubatch` (tokens of a prompt computed at once). The KV cache is llama.cpp's default,
F16 and one stream for each sequence.
"""

import ctypes
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import llama_cpp as llama
import numpy as np

BATCH = 2048  # tokens given to llama_decode at once, at most


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
        if not self.model:
            raise ValueError("llama.cpp cannot load this file")
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.threads, self.setting = threads, setting
        self.contexts: dict[tuple[int, int], Any] = {}
        self.batch = llama.llama_batch_init(BATCH, 0, 1)
        features = llama.llama_print_system_info().decode().replace(" = 1", "").replace(" | ", " ").strip()
        self.about = f"llama-cpp-python {version('llama_cpp_python')} ({features})"

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[int]]:
        context = self.context(len(prompts), len(prompts[0]) + new_tokens + 1)
        llama.llama_memory_clear(llama.llama_get_memory(context), False)
        first: list[int] = []
        start = time.perf_counter()
        for seq, prompt in enumerate(prompts):
            for at in range(0, len(prompt), BATCH):
                part = prompt[at : at + BATCH]
                self.decode(context, part, range(at, at + len(part)), [seq] * len(part), last_only=True)
            first += self.greedy(context, 1)
        prefilled = time.perf_counter()
        tokens: list[int] = first
        for step in range(new_tokens):
            positions = [len(prompts[0]) + step] * len(prompts)
            self.decode(context, tokens, positions, range(len(prompts)), last_only=False)
            tokens = self.greedy(context, len(prompts))
        return prefilled - start, time.perf_counter() - prefilled, first

    def context(self, sequences: int, length: int) -> Any:
        """A context for so many sequences of so many tokens, made once (a fresh one would pay for its memory again)."""
        if (sequences, length) not in self.contexts:
            params = llama.llama_context_default_params()
            params.n_ctx = sequences * -(-length // 256) * 256
            params.n_seq_max = sequences
            params.n_batch = BATCH
            params.n_ubatch = self.setting["ubatch"]
            params.n_threads = params.n_threads_batch = self.threads
            params.flash_attn_type = int(self.setting["flash_attention"])
            params.no_perf = True
            context = llama.llama_init_from_model(self.model, params)
            if not context:
                raise ValueError(f"llama.cpp makes no context for {sequences} sequences of {length} tokens")
            self.contexts[sequences, length] = context
        return self.contexts[sequences, length]

    def decode(
        self, context: Any, tokens: Sequence[int], positions: Sequence[int], seqs: Sequence[int], *, last_only: bool
    ) -> None:
        """One batch: token, position and sequence of every entry; logits of all entries or of the last one."""
        batch, count = self.batch, len(tokens)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i] = tokens[i]
            batch.pos[i] = positions[i]
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seqs[i]
            batch.logits[i] = not last_only or i == count - 1
        status = llama.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def greedy(self, context: Any, rows: int) -> list[int]:
        """The most likely token of every row of logits."""
        logits = ctypes.cast(llama.llama_get_logits(context), ctypes.c_void_p).value
        row = ctypes.c_float * (rows * self.vocab_size)
        return np.frombuffer(row.from_address(logits), np.float32).reshape(rows, -1).argmax(1).tolist()
