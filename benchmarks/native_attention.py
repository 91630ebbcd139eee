"""How fast attention and the sampler of the native core are: `python -m benchmarks.native_attention [--isa avx2]`.

Attention: bytes of K and V read per second where one token is decoded, multiplications per second where a chunk is fed.
Sampler: microseconds a row of 152k logits. Each figure is the best of its repeats; the machine should be otherwise idle.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from headrace import core

MODELS = {"SmolLM2-135M": (30, 9, 3, 64), "Qwen2.5-1.5B": (28, 12, 2, 128)}  # layers, heads, KV heads, head size
VOCAB = 151_936


def best(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def attention(model: str, dtype: str, context: int, rows: int, threads: int, isa: str, feeds: int = 1) -> str:
    module = core.module()
    layers, heads, kv_heads, dim = MODELS[model]
    blocks = -(-(context + rows) // 16)
    pool = module.KVPool(layers, blocks * feeds, 16, kv_heads, dim, dtype)
    workers = module.ThreadPool(threads)  # the step keeps it alive
    step = module.AttentionStep(pool, workers, isa)
    rng = np.random.default_rng(0)
    tables = rng.permutation(blocks * feeds).astype(np.int32).reshape(feeds, blocks)
    options = module.AttentionOptions()
    options.heads, options.scale = heads, dim**-0.5

    def run(start: int, count: int, only: np.ndarray) -> Callable[[], object]:
        n = count * len(only)
        x = rng.standard_normal((n, (heads + 2 * kv_heads) * dim)).astype(np.float32)
        q, k, v = np.split(x, [heads * dim, (heads + kv_heads) * dim], axis=1)
        out = np.empty((n, heads * dim), dtype=np.float32)
        positions = np.tile(np.arange(start, start + count, dtype=np.int32), len(only))
        ends = np.arange(0, n + 1, count, dtype=np.int32)
        step.begin(positions, ends, np.full(len(only), start, np.int32), np.full(len(only), count, np.int32), only)
        return lambda: [step.attend(layer, q, k, v, options, out) for layer in range(layers)]

    if context:
        for feed in range(feeds):
            run(0, context, tables[feed : feed + 1])()
    seconds = best(run(context, rows, tables), 10 if rows > 64 else 40) / layers
    tokens = feeds * sum(context + row + 1 for row in range(rows))
    gigabytes = pool.bytes / layers / seconds / 1e9
    gigamacs = 2 * tokens * heads * dim / seconds / 1e9
    what = f"{model:13} {dtype:5} {feeds:2} x {rows:4} rows at {context:5}, {threads} threads"
    return f"{what}: {seconds * 1e6:9.1f} us a layer, {gigabytes:6.1f} GB/s of KV, {gigamacs:6.1f} GMAC/s"


SAMPLERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "greedy, repetition": {"temperature": 0.0, "repetition_penalty": 1.1},
    "temperature": {"temperature": 0.7},
    "top-k 50": {"temperature": 0.7, "top_k": 50},
    "top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top-k, top-p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "typical 0.9": {"typical_p": 0.9},
}


def sampler(isa: str) -> list[str]:
    module = core.module()
    z = np.random.default_rng(0).normal(0, 3, VOCAB).astype(np.float32)
    maxima = np.empty(-(-VOCAB // module.VOCAB_BLOCK), dtype=np.float32)
    module.block_maxima(z, maxima)
    draw, history = module.Sampler(VOCAB, isa or None), module.History(list(range(100)))

    def time_of(settings: dict[str, float], known_maxima: bool, logprobs: int) -> float:
        params = module.SampleParams()
        for key, value in settings.items():
            setattr(params, key, value)
        known = maxima if known_maxima else None
        return 1e6 * best(lambda: draw.draw(z, params, history, [(1, 2)], maxima=known, logprobs=logprobs), 100)

    lines = []
    for name, settings in SAMPLERS.items():
        us = [time_of(settings, *how) for how in ((False, -1), (True, -1), (True, 5))]
        lines.append(f"{name:20} {us[0]:8.1f} us, {us[1]:8.1f} with block maxima, {us[2]:8.1f} with 5 log-probabilities")
    top = 1e6 * best(lambda: draw.top(z, 16, maxima=maxima), 100)
    return [*lines, f"{'16 best':20} {top:8.1f} us with block maxima"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", default="", help="amx, avx512, avx512vnni, avxvnni, avx2 or plain; default: the best")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    for model in MODELS:
        for dtype in ("bf16", "int8"):
            for context, rows, feeds in [(512, 1, 1), (4096, 1, 1), (4096, 8, 1), (512, 1, 32), (0, 512, 1), (1536, 512, 1)]:
                print(attention(model, dtype, context, rows, arguments.threads, arguments.isa, feeds), flush=True)
    print("\n".join(sampler(arguments.isa)))


if __name__ == "__main__":
    main()
