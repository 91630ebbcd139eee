"""Run by an interpreter that has llama-cpp-python: what llama.cpp, with its default settings, says of token sequences.

usage: llama_cpp_rows.py FILE.gguf THREADS    reads one JSON line a sequence: {"tokens": [...], "rows": n} is answered with
the logits of the last n tokens, float32 [n, vocabulary]; {"tokens": [...], "scores": n} with the log-probabilities of the last
n tokens, float64 [n]. Nothing is written to disk: a sequence's logits of a large vocabulary are many megabytes.
"""

import json
import sys

import llama_cpp
import numpy as np

CONTEXT = 512


def log_softmax(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    sizes = {"n_ctx": CONTEXT, "n_batch": CONTEXT, "n_threads": threads, "n_threads_batch": threads}
    model = llama_cpp.Llama(path, logits_all=True, verbose=False, n_gpu_layers=0, **sizes)
    for line in sys.stdin:
        asked = json.loads(line)
        tokens = asked["tokens"]
        model.reset()
        model.eval(tokens)
        logits = np.array(model.scores[: len(tokens)], np.float32)
        if "rows" in asked:
            answer = logits[-asked["rows"] :]
        else:
            before = logits[-asked["scores"] - 1 : -1]
            answer = log_softmax(before)[np.arange(len(before)), tokens[-asked["scores"] :]]
        sys.stdout.buffer.write(answer.tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
