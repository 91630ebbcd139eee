"""bench local: how fast Headrace is on this machine."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.files import writable
from headrace.cli.help import short_help
from headrace.cli.options import with_groups
from headrace.cli.output import print_table, say
from headrace.cli.status import status


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "cells rounds threads beside profile json_file",
        ("headrace bench local smollm2-135m", "Every cell of the table, on this machine."),
        ("headrace bench local MODEL --cells pp512,b1 --json figures.json", "Two of them, written down."),
        ("headrace bench local MODEL --beside ../before/.venv", "Is this build slower than another?"),
    )
    bench.command("local", cls=short)(with_groups(local))


def local(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A catalog name, a GGUF file, a folder, a hub id.")],
    cells: Annotated[str, typer.Option(help="What to measure, as pp512,b1; every cell where not given.")] = "",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Measurements of every cell, after one to warm up: 5; with --beside 9, no fewer.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; every core where not given.")] = None,
    backend: Annotated[str, typer.Option(help="auto, native or torch.")] = "auto",
    beside: Annotated[
        Path | None, typer.Option(metavar="OTHER_VENV", help="A virtual environment with another build: is this one slower?")
    ] = None,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="In place of speeds: where a step of 1 to 256 rows spends its time."),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> int:
    """Prefill of 512 and 2048 tokens, decoding at batch 1 to 32 and at contexts up to 8k, verifying 5 and 8 tokens, load time,
    memory. --beside: the same of two builds, in turns, their ratios, and exit code 1 where this one is slower. --profile:
    phases of the native core, with what they read and multiply and their share of what the machine can do; HEADRACE_ISA
    chooses the instruction set."""
    if profile:
        if cells or beside or backend not in ("auto", "native"):
            raise ValueError("--profile has no cells, is of one build, and of the native core; leave the other options out")
        _profile(model, 5 if rounds is None else rounds, threads, json_file)
        return 0
    from headrace.bench import local as bench
    from headrace.bench.competitors import fitting
    from headrace.cli.opening import look_at

    def done(result: dict[str, Any]) -> None:
        name, figures = list(result["cells"].items())[-1]
        against = f", {figures['ratio']:.3f} of the other build" if beside else ""
        say(f"{name}: {figures['tokens_per_s']:.1f} tokens/s{against}")
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=2) + "\n")
        status().advance(1)

    wanted = fitting(bench.pick(cells), look_at(model).config, say)
    status().start("measuring", len(wanted), unit="cells")
    given: dict[str, Any] = {"threads": threads, "setting": {"backend": backend}, "say": say, "done": done}
    if beside is not None:
        from headrace.bench.compare_builds import PAIRS, compare_builds

        result = compare_builds(model, beside, wanted, pairs=PAIRS if rounds is None else rounds, **given)
        _print_beside(result)
        return int(not result["verdict"]["not_slower"])
    _print_alone(bench.measure_local(model, wanted, rounds=5 if rounds is None else rounds, **given))
    return 0


def _profile(model: str, rounds: int, threads: int | None, json_file: Path | None) -> None:
    from headrace.bench.profile import profile

    def done(result: dict[str, Any]) -> None:
        rows, step = list(result["steps"].items())[-1]
        say(f"{rows} rows: {step['ms']:.2f} ms a step")
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=2) + "\n")

    _print_profile(profile(model, rounds=rounds, threads=threads, say=say, done=done))


def _print_profile(result: dict[str, Any]) -> None:
    columns = ("rows", "phase", "ms", "idle", "weights MB", "rows MB", "MMAC", "of limit", "kernel")
    lines = []
    for rows, step in result["steps"].items():
        lines += [(rows, line["phase"], *_touched(line)) for line in step["phases"]]
        lines += [(rows, "all of", *_touched(line)) for line in step["kernels"]]
    print_table(columns, lines)
    print()
    for rows, step in result["steps"].items():
        print(f"{rows} rows: {step['ms']:.3f} ms a step, {step['idle_ms']:.3f} idle, {step['outside_ms']:.3f} outside the core")
    peaks = ", ".join(f"{products} {gmacs:.0f}" for products, gmacs in result["gmacs"].items())
    print(f"{result['isa']}, {result['threads']} threads: memory read at {result['bandwidth_gb_s']:.1f} GB/s, ", end="")
    print(f"products at most {peaks} GMAC/s")


def _touched(line: dict[str, Any]) -> tuple[str, ...]:
    share = "" if line["share"] is None else f"{line['share']:.0%} {line['limit']}"
    times = (f"{line['ms']:.3f}", f"{line['idle_ms']:.3f}")
    return (*times, f"{line['weight_mb']:.2f}", f"{line['row_mb']:.2f}", f"{line['mmacs']:.1f}", share, line["kernel"])


def _print_alone(result: dict[str, Any]) -> None:
    columns = ("cell", "tokens/s", "least", "most", "GB/s", "other load")
    print_table(columns, [_row(name, figures) for name, figures in result["cells"].items()])
    print()
    for name, figures in result["cells"].items():
        if "cost" in figures:
            print(f"a step of {name[1:]} tokens to verify costs {figures['cost']:.2f} of a step of one")
    print(f"{result['about']}, {result['threads']} threads: loaded in {result['load_s']:.1f} s, ", end="")
    print(f"peak memory {result['peak_rss_mb']:.0f} MiB, memory read at {result['bandwidth_gb_s']:.1f} GB/s")


def _row(cell: str, figures: dict[str, Any]) -> tuple[str, ...]:
    speeds = [f"{figures[name]:.1f}" for name in ("tokens_per_s", "least", "most")]
    return (cell, *speeds, f"{figures['bandwidth_gb_s']:.1f}", f"{figures['others_cpu']:.0%}")


def _print_beside(result: dict[str, Any]) -> None:
    from headrace.bench.compare_builds import FLOOR

    columns = ("cell", "this build", "other build", "ratio", "interval", "GB/s", "other load")
    print_table(columns, [_pair(name, figures) for name, figures in result["cells"].items()])
    print()
    for name, build in zip(("this build", "other build"), result["builds"].values(), strict=True):
        print(f"{name}: {build['version']}, {'commit ' + build['commit'] if build['commit'] else 'no commit'}, {build['file']}")
    found = result["verdict"]
    below = f"the intervals of {', '.join(found['below'])} lie" if found["below"] else "no cell's interval lies"
    print(f"{'not slower' if found['not_slower'] else 'slower'}: ", end="")
    print(f"{below} wholly below {FLOOR}, the geometric mean of the ratios is {found['geometric_mean']:.3f}")


def _pair(cell: str, figures: dict[str, Any]) -> tuple[str, ...]:
    (other,) = figures["peers"].values()
    speeds = (f"{figures['tokens_per_s']:.1f}", f"{other['tokens_per_s']:.1f}")
    ratio = (f"{figures['ratio']:.3f}", "{:.3f} to {:.3f}".format(*figures["interval"]))
    return (cell, *speeds, *ratio, f"{figures['bandwidth_gb_s']:.1f}", f"{figures['others_cpu']:.0%}")
