"""bench local: speed of Headrace on this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.figures import Measurement
from headrace.cli.measuring import Threads, add_measurement, report_cell
from headrace.cli.output import say, status


def register(bench: typer.Typer) -> None:
    """Add the command."""
    add_measurement(
        bench,
        local,
        "cells rounds threads beside profile json_file",
        ("headrace bench local smollm2-135m", "Every cell, on this machine."),
        ("headrace bench local MODEL --cells pp512,b1 --json figures.json", "Two cells, with a JSON file."),
        ("headrace bench local MODEL --beside ../before/.venv", "Compare this build with another."),
    )


def local(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A catalog name, a GGUF file, a folder, or a repository of the hub.")
    ],
    cells: Annotated[str, typer.Option(help="Cells to measure, such as pp512,b1 (default: all).")] = "",
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Measurements of each cell, after one warm-up (default: 5; with --beside at least 9)."),
    ] = None,
    threads: Threads = None,
    backend: Annotated[str, typer.Option(help="auto, native or torch.")] = "auto",
    beside: Annotated[
        Path | None, typer.Option(metavar="OTHER_VENV", help="Virtual environment with another build to compare with.")
    ] = None,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Instead of speeds: time of each phase of steps with 1 to 256 rows."),
    ] = False,
    *,
    save: Callable[[Any], None],
) -> Measurement:
    """Measure prefill of 512 and 2048 tokens, decoding at batch 1 to 32 and at contexts up to 8k, verification of 5 and 8
    tokens, load time and memory.

    --beside: the same for two builds in alternating runs, with their ratios; exit code 1 if this build is slower. --profile:
    phases of the native core, the bytes and operations of each, and their share of the machine's limit. HEADRACE_ISA chooses
    the instruction set.
    """
    if profile:
        if cells or beside or backend not in ("auto", "native"):
            raise ValueError("--profile measures one build on the native core, without cells; leave the other options out")
        return _profile(model, 5 if rounds is None else rounds, threads, save)
    from headrace.bench import local as bench
    from headrace.bench.competitors import fitting
    from headrace.cli.opening import look_at

    wanted = fitting(bench.pick(cells), look_at(model).config, say)
    status().start("measuring", len(wanted), unit="cells")
    done = report_cell(_cell_line, save)
    common: dict[str, Any] = {"threads": threads, "setting": {"backend": backend}, "say": say, "done": done}
    if beside is not None:
        from headrace.bench import compare_builds as builds

        result = builds.compare_builds(model, beside, wanted, pairs=builds.PAIRS if rounds is None else rounds, **common)
        return Measurement(result, builds.printed(result), exit_code=int(not result["verdict"]["not_slower"]))
    result = bench.measure_local(model, wanted, rounds=5 if rounds is None else rounds, **common)
    return Measurement(result, bench.printed(result))


def _cell_line(name: str, figures: dict[str, Any]) -> str:
    against = f", {figures['ratio']:.3f} of the other build" if "ratio" in figures else ""
    return f"{name}: {figures['tokens_per_s']:.1f} tokens/s{against}"


def _profile(model: str, rounds: int, threads: int | None, save: Callable[[Any], None]) -> Measurement:
    from headrace.bench import profile

    def done(result: dict[str, Any]) -> None:
        rows, step = list(result["steps"].items())[-1]
        say(f"{rows} rows: {step['ms']:.2f} ms a step")
        save(result)

    result = profile.profile(model, rounds=rounds, threads=threads, say=say, done=done)
    return Measurement(result, profile.printed(result))
