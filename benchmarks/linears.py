"""Speed of the linear kernels as a share of the machine's limit: `python -m benchmarks.linears`. Needs no model."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import peak_share
from benchmarks.command import run
from headrace import core
from headrace.backends.native.program import thread_pool
from headrace.bench.calibrate import stored
from headrace.bench.machine import Say
from headrace.bench.profile import limits, share_of
from headrace.cli.options import writable
from headrace.cli.output import print_table, say, status

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
    "C8",
    "BF16",
)
ROWS = (1, 8, 16, 32, 256)
# Outputs and inputs of a layer.
SHAPE = (4096, 2048)
# Packed weights of each format at least: more than most caches hold.
MEBIBYTES = 64


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
    """Content of the JSON file: the machine's limits (`profile.limits`), and the figures in `types` by type and rows.

    Figures: `gmacs` (10^9 products per second), `gb_s` (packed weights read), `limit` (memory or products) and `share`: least
    possible time divided by the measured one. Layers run one after the other, as in a step; medians of the repeats.
    Raises ValueError for an unknown type, or without a type, row or repeat.
    """
    if unknown := [kind for kind in types if kind not in TYPES]:
        raise ValueError(f"there are no kernels for {unknown[0]!r}; choose from {', '.join(TYPES)}")
    if repeats < 1 or not types or not rows or min(rows) < 1:
        raise ValueError("there is at least one type, one row and one repeat")
    rng, pool = np.random.default_rng(0), thread_pool(threads or 0)
    result: dict[str, Any] = {**limits(threads or 0), "shape": list(shape), "types": {}}
    for kind in types:
        arena, layers = core.module().Arena(), list[Any]()
        while not layers or arena.used < mebibytes << 20:
            layers.append(
                core.module().PackedLinear([core.module().pack(stored(kind, *shape, rng), kind, *shape, arena, pool)])
            )
        result["types"][kind] = {}
        for count in rows:
            x = rng.standard_normal((count, shape[1])).astype(np.float32)
            # C8 is for inputs with one scale a row.
            more = {"activations": "token"} if kind == "C8" else {}
            core.module().time_linears(layers, x, pool, 1, **more)  # memory for the results is there
            seconds = median(core.module().time_linears(layers, x, pool, repeats, **more))
            macs = count * shape[0] * shape[1] * len(layers)
            limit, share = share_of(result, "bf16" if kind == "BF16" else "int8", arena.used, macs, seconds)
            figures = {"gmacs": macs / seconds / 1e9, "gb_s": arena.used / seconds / 1e9, "limit": limit, "share": share}
            result["types"][kind][str(count)] = figures
        shares = ", ".join(f"{figures['share']:.0%}" for figures in result["types"][kind].values())
        say(f"{kind}: {shares}")
        done(result)
    return result


def linears(
    types: Annotated[str, typer.Option(help="Formats of weights, as Q4_K,BF16; every one where not given.")] = "",
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,8,16,32,256",
    mebibytes: Annotated[
        int, typer.Option(min=0, help="Packed weights of each format, at least: more than the caches hold, or 0: one layer.")
    ] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each, after one to warm up.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; every core where not given.")] = None,
    shares: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Shares that were kept: exit with 1 where one is below 0.75 of it."),
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Keep the shares of this run in that file.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> int:
    """Linear layers of every format of weights at 1 to 256 rows: their share of the machine's own peak of products and of
    memory read, measured beside them. No model is opened; HEADRACE_ISA chooses the instruction set."""
    if update and shares is None:
        raise ValueError("--update keeps shares in a file; name it with --shares")
    # Raises for an invalid file before anything is measured.
    if shares is not None:
        _ = writable(shares) if update else peak_share.read(shares)

    def done(result: dict[str, Any]) -> None:
        status().advance(1)
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=2) + "\n")

    kinds = [kind.strip().upper() for kind in types.split(",") if kind.strip()] or TYPES
    try:
        counts = [int(count) for count in rows.split(",")]
    except ValueError:
        raise ValueError(f"--rows takes numbers, as 1,8,16; not {rows!r}") from None
    setting: dict[str, Any] = {"mebibytes": mebibytes, "repeats": repeats, "threads": threads, "say": say}
    status().start("measuring", len(kinds), unit="formats")
    result = measure_linears(types=kinds, rows=counts, **setting, done=done)
    lines = [(kind, *map(_cell, by_rows.values())) for kind, by_rows in result["types"].items()]
    print_table(("type", *(f"{count} rows" for count in counts)), lines)
    print()
    print(
        f"GMAC/s and share of the limit; {result['isa']}, {result['threads']} threads: memory read at "
        f"{result['bandwidth_gb_s']:.1f} GB/s, products at most int8 {result['gmacs']['int8']:.0f}, "
        f"bf16 {result['gmacs']['bf16']:.0f} GMAC/s"
    )
    return 0 if shares is None else _compared(shares, update, result, setting)


def _compared(file: Path, update: bool, result: dict[str, Any], setting: dict[str, Any]) -> int:
    """Compare with the file and measure fallen shares again. Returns 1 if one is fallen in both runs, otherwise 0."""
    if update:
        peak_share.keep(file, result)
        say(f"kept in {file}, for {' and '.join(peak_share.machine(result))}")
        return 0
    if (before := peak_share.kept(file, result)) is None:
        say(f"{file} has no shares of {' with '.join(peak_share.machine(result))}: nothing is compared (--update keeps these)")
        return 0
    now = peak_share.shares_of(result)
    if fell := peak_share.fallen(now, before):
        kinds, counts = ({pair[at] for pair in fell} for at in (0, 1))
        again = measure_linears(types=sorted(kinds), rows=sorted(map(int, counts)), **setting)
        now = peak_share.best(now, peak_share.shares_of(again))
        fell = peak_share.fallen(now, before)
    for kind, count in fell:
        print(f"slower: {kind} at {count} rows has {now[kind][count]:.0%} of the limit and had {before[kind][count]:.0%}")
    if not fell:
        print(f"no share is below {peak_share.FALL} of what {file} has")
    return int(bool(fell))


def _cell(figures: dict[str, Any]) -> str:
    return f"{figures['gmacs']:.0f} {figures['share']:.0%} {figures['limit']}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    examples = (
        ("", "Every format at 1, 8, 16, 32 and 256 rows."),
        ("--types Q4_K,Q8_0 --rows 1,8", "Two of them, at few rows."),
        ("--shares shares.json --update", "Keep what this machine does; without --update, compare."),
    )
    return run(linears, "linears", argv, examples)


if __name__ == "__main__":
    sys.exit(main())
