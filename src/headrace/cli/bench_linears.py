"""bench linears: the kernels of linear layers beside what the machine can do."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.files import writable
from headrace.cli.help import short_help
from headrace.cli.output import print_table, say
from headrace.cli.status import status


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "types rows mebibytes repeats threads json_file",
        ("headrace bench linears", "Every format at 1, 8, 16, 32 and 256 rows."),
        ("headrace bench linears --types Q4_K,Q8_0 --rows 1,8", "Two of them, at few rows."),
        ("headrace bench linears --types Q4_0,S4,Q8_0,S8 --mebibytes 0", "2:4 beside dense, from the cache."),
    )
    bench.command("linears", cls=short)(linears)


def linears(
    types: Annotated[str, typer.Option(help="Formats of weights, as Q4_K,BF16; every one where not given.")] = "",
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,8,16,32,256",
    mebibytes: Annotated[
        int, typer.Option(min=0, help="Packed weights of each format, at least: more than the caches hold, or 0: one layer.")
    ] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each, after one to warm up.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; every core where not given.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """Linear layers of every format of weights at 1 to 256 rows: their share of the machine's own peak of products and of
    memory read, measured beside them. No model is opened; HEADRACE_ISA chooses the instruction set."""
    from headrace.bench.linears import TYPES, measure_linears

    def done(result: dict[str, Any]) -> None:
        status().advance(1)
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=2) + "\n")

    kinds = [kind.strip().upper() for kind in types.split(",") if kind.strip()] or TYPES
    try:
        counts = [int(count) for count in rows.split(",")]
    except ValueError:
        raise ValueError(f"--rows takes numbers, as 1,8,16; not {rows!r}") from None
    status().start("measuring", len(kinds), unit="formats")
    result = measure_linears(
        types=kinds, rows=counts, mebibytes=mebibytes, repeats=repeats, threads=threads, say=say, done=done
    )
    lines = [(kind, *map(_cell, by_rows.values())) for kind, by_rows in result["types"].items()]
    print_table(("type", *(f"{count} rows" for count in counts)), lines)
    print()
    print(
        f"GMAC/s and share of the limit; {result['isa']}, {result['threads']} threads: memory read at "
        f"{result['bandwidth_gb_s']:.1f} GB/s, products at most int8 {result['gmacs']['int8']:.0f}, "
        f"bf16 {result['gmacs']['bf16']:.0f} GMAC/s"
    )


def _cell(figures: dict[str, Any]) -> str:
    return f"{figures['gmacs']:.0f} {figures['share']:.0%} {figures['limit']}"
