"""Run by an interpreter that has llama-cpp-python: rows, or scores of a reranker, for token sequences of GGUF files.

usage: llama_cpp_embeddings.py NAMES.json   with {"FILE.gguf": {"tokens": [[...], ...], "rank": false}, ...}; writes FILE.npz
with one array per sequence: rows after the last layer [tokens, width], or with "rank" what the file's head returns [labels].
Nothing is written for a file that llama.cpp does not open.
"""

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


def embeddings(path: Path, sequences: list[list[int]], rank: bool) -> list[np.ndarray]:
    kind = llama_cpp.LLAMA_POOLING_TYPE_RANK if rank else llama_cpp.LLAMA_POOLING_TYPE_NONE
    f32 = llama_cpp.GGML_TYPE_F32
    settings: dict[str, Any] = {"n_ctx": 1024, "n_batch": 1024, "n_ubatch": 1024, "n_threads": 1, "n_gpu_layers": 0}
    model = llama_cpp.Llama(
        str(path), embedding=True, pooling_type=kind, verbose=False, type_k=f32, type_v=f32, flash_attn=False, **settings
    )
    arrays = []
    for tokens in sequences:
        model._ctx.kv_cache_clear()
        model._batch.reset()
        model._batch.add_sequence(tokens, 0, logits_all=True)
        model._ctx.decode(model._batch)
        if rank:
            labels = llama_cpp.llama_model_n_cls_out(model.model)
            row = llama_cpp.llama_get_embeddings_seq(model.ctx, 0)
            arrays.append(np.ctypeslib.as_array(row, (labels,)).copy())
        else:
            rows = llama_cpp.llama_get_embeddings(model.ctx)
            arrays.append(np.ctypeslib.as_array(rows, (len(tokens), model.n_embd())).copy())
    model.close()
    return arrays


def main() -> None:
    for name, wanted in json.loads(Path(sys.argv[1]).read_text()).items():
        try:
            arrays = embeddings(Path(name), wanted["tokens"], wanted["rank"])
        except ValueError as error:
            print(f"{name}: {error}", flush=True)
            continue
        np.savez(Path(name).with_suffix(".npz"), **{str(i): array for i, array in enumerate(arrays)})


if __name__ == "__main__":
    main()
