"""How near the linear kernels come to what the machine can do: every format of weights, a few numbers of rows, no model."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from headrace.backends.native.threads import thread_pool
from headrace.bench.engines import Say
from headrace.bench.profile import limits, share_of
from headrace.core import core
from headrace.weights.kinds import KINDS
from headrace.weights.quantized.rows import POINTS
from headrace.weights.sparse import INDICES, ZEROS

TYPES = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "S4",
    "S8",
    "G4_32",
    "G4_128",
    "G8_32",
    "G8_128",
    "BF16",
)
ROWS = (1, 8, 16, 32, 256)
SHAPE = (4096, 2048)  # outputs, inputs
MEBIBYTES = 64  # of packed weights, at least: more than most caches hold


def measure_linears(
    *,
    types: Sequence[str] = TYPES,
    rows: Sequence[int] = ROWS,
    shape: tuple[int, int] = SHAPE,
    mebibytes: int = MEBIBYTES,
    repeats: int = 5,
    threads: int | None = None,
    say: Say = lambda line: None,
    done: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """The figures as they stand in the JSON: those of `profile.limits`, measured before, and in `types` by type and rows
    `gmacs` (10^9 products a second), `gb_s` (of packed weights read), `limit` and `share`: of the time that memory or products
    would take at best. Layers one after the other, as in a step; medians of the repeats. Raises ValueError for an unknown type,
    and where there is nothing to measure.
    """
    if unknown := [kind for kind in types if kind not in TYPES]:
        raise ValueError(f"there are no kernels for {unknown[0]!r}; choose from {', '.join(TYPES)}")
    if repeats < 1 or not types or not rows or min(rows) < 1:
        raise ValueError("there is at least one type, one row and one repeat")
    rng, pool = np.random.default_rng(0), thread_pool(threads or 0)
    result: dict[str, Any] = {**limits(threads or 0), "shape": list(shape), "types": {}}
    for kind in types:
        arena, layers = core().Arena(), list[Any]()
        while not layers or arena.used < mebibytes << 20:
            layers.append(core().PackedLinear([core().pack(_stored(kind, *shape, rng), kind, *shape, arena, pool)]))
        result["types"][kind] = {}
        for count in rows:
            x = rng.standard_normal((count, shape[1])).astype(np.float32)
            core().time_linears(layers, x, pool, 1)  # memory for the results is there
            seconds = median(core().time_linears(layers, x, pool, repeats))
            macs = count * shape[0] * shape[1] * len(layers)
            limit, share = share_of(result, "bf16" if kind == "BF16" else "int8", arena.used, macs, seconds)
            figures = {"gmacs": macs / seconds / 1e9, "gb_s": arena.used / seconds / 1e9, "limit": limit, "share": share}
            result["types"][kind][str(count)] = figures
        shares = ", ".join(f"{figures['share']:.0%}" for figures in result["types"][kind].values())
        say(f"{kind}: {shares}")
        done(result)
    return result


def _stored(kind: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Random rows [n, bytes] as in a model: normal bfloat16, or blocks whose scales are finite, as no byte is above 0x3b."""
    if kind == "BF16":  # among random bits are subnormal numbers, which some processors multiply a hundred times slower
        return rng.standard_normal((n, k)).astype(np.float32).view(np.uint16)[:, 1::2].copy().view(np.uint8)
    block, block_bytes = KINDS[kind]
    rows = rng.integers(0, 256, (n, k // block, block_bytes), np.uint8) & 0x3B
    if kind in ZEROS:
        rows[:, :, 2:6] = INDICES[rng.integers(0, 6, (n, k // block, 4))] | INDICES[rng.integers(0, 6, (n, k // block, 4))] << 4
    if kind in POINTS:
        rows[:, :, 2] &= 15
    return rows.reshape(n, -1)
