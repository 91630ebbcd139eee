"""Run by an interpreter that has llama-cpp-python: logits of every token of every prompt, for each GGUF file named.

usage: llama_cpp_logits.py PROMPTS.json FILE.gguf...   writes FILE.npz with one array [tokens, vocabulary] per prompt; none for
a file that llama.cpp does not open
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

# The defaults of the Python package (32, 1 and 1) override the keys of the file; -1 means these.
FROM_FILE = {"yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0, "yarn_attn_factor": -1.0}


def logits(path: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    f32 = llama_cpp.GGML_TYPE_F32
    settings = {"n_ctx": 256, "n_batch": 256, "n_threads": 1, "type_k": f32, "type_v": f32, "n_gpu_layers": 0}
    model = llama_cpp.Llama(str(path), logits_all=True, verbose=False, **settings, **FROM_FILE)
    rows = []
    for prompt in prompts:
        model.reset()
        model.eval(prompt)
        rows.append(np.array(model.scores[: len(prompt)], dtype=np.float32))
    model.close()
    return rows


def main() -> None:
    prompts = json.loads(Path(sys.argv[1]).read_text())
    for name in sys.argv[2:]:
        path = Path(name)
        try:
            made = logits(path, prompts)
        except ValueError as error:
            print(f"{path.name}: {error}", flush=True)
            continue
        np.savez(path.with_suffix(".npz"), **{str(i): rows for i, rows in enumerate(made)})


if __name__ == "__main__":
    main()
