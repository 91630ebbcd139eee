"""bench linears: the kernels of linear layers beside what the machine can do, and beside what they could before."""

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
        "types rows mebibytes repeats threads shares update json_file",
        ("headrace bench linears", "Every format at 1, 8, 16, 32 and 256 rows."),
        ("headrace bench linears --types Q4_K,Q8_0 --rows 1,8", "Two of them, at few rows."),
        ("headrace bench linears --shares shares.json --update", "Keep what this machine does; without --update, compare."),
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
    shares: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Shares that were kept: exit with 1 where one is below 0.75 of it."),
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Keep the shares of this run in that file.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> int:
    """Linear layers of every format of weights at 1 to 256 rows: their share of the machine's own peak of products and of
    memory read, measured beside them. No model is opened; HEADRACE_ISA chooses the instruction set."""
    from headrace.bench.linears import TYPES, measure_linears
    from headrace.bench.shares import read

    if update and shares is None:
        raise ValueError("--update keeps shares in a file; name it with --shares")
    if shares is not None:  # what is wrong with it is said before anything is measured
        _ = writable(shares) if update else read(shares)

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
    """What has fallen since the file was written is measured once more; 1 where it has fallen then, too."""
    from headrace.bench import shares
    from headrace.bench.linears import measure_linears

    if update:
        shares.keep(file, result)
        say(f"kept in {file}, for {' and '.join(shares.machine(result))}")
        return 0
    if (before := shares.kept(file, result)) is None:
        say(f"{file} has no shares of {' with '.join(shares.machine(result))}: nothing is compared (--update keeps these)")
        return 0
    now = shares.shares_of(result)
    if fell := shares.fallen(now, before):
        kinds, counts = ({pair[at] for pair in fell} for at in (0, 1))
        again = measure_linears(types=sorted(kinds), rows=sorted(map(int, counts)), **setting)
        now = shares.best(now, shares.shares_of(again))
        fell = shares.fallen(now, before)
    for kind, count in fell:
        print(f"slower: {kind} at {count} rows has {now[kind][count]:.0%} of the limit and had {before[kind][count]:.0%}")
    if not fell:
        print(f"no share is below {shares.FALL} of what {file} has")
    return int(bool(fell))


def _cell(figures: dict[str, Any]) -> str:
    return f"{figures['gmacs']:.0f} {figures['share']:.0%} {figures['limit']}"
