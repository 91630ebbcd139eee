"""How fast the linear layers of the native core are: `python benchmarks/native_linear.py [--isa avx2] [--types Q4_K,BF16]`.

For every type of weights and number of rows: multiplications per second (GMAC/s), and bytes of packed weights read per second
(GB/s) beside what a plain read of memory gives. Layers of the given size, more of them than the caches hold, one after the
other as in a step. Each figure is the median of its repeats; the machine should be otherwise idle.
"""

import argparse
from statistics import median

import numpy as np

from headrace import native
from headrace.weights.kinds import KINDS

TYPES = "Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_NL,IQ4_XS,BF16"


def stored(kind: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Random rows [n, bytes] whose scales are finite: no byte of a half or a bfloat16 above 0x3b."""
    block, block_bytes = KINDS[kind]
    return rng.integers(0, 256, (n, k // block * block_bytes), np.uint8) & 0x3B


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--rows", default="1,4,8,32,512")
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--megabytes", type=int, default=64, help="of packed weights, at least")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default="")
    options = parser.parse_args()
    core, rng = native.core(), np.random.default_rng(0)
    pool = core.ThreadPool(options.threads)
    print(
        f"memory read: {max(core.read_bandwidth(pool)) / 1e9:.1f} GB/s, {options.n} x {options.k}, {options.isa or 'best isa'}"
    )
    print("type     rows     GMAC/s    GB/s")
    for kind in options.types.split(","):
        arena, layers = core.Arena(), []
        while not layers or arena.used < options.megabytes << 20:
            rows = stored(kind, options.n, options.k, rng)
            layers.append(core.PackedLinear([core.pack(rows, kind, options.n, options.k, arena, pool, isa=options.isa)]))
        for m in map(int, options.rows.split(",")):
            x = rng.standard_normal((m, options.k)).astype(np.float32)
            seconds = median(core.time_linears(layers, x, pool, options.repeats, isa=options.isa))
            macs = m * options.n * options.k * len(layers)
            print(f"{kind:8} {m:4} {macs / seconds / 1e9:10.1f} {arena.used / seconds / 1e9:7.1f}")


if __name__ == "__main__":
    main()
