"""bench parallel: one model in several processes next to one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.figures import Measurement, Table
from headrace.cli.measuring import Rounds, add_measurement
from headrace.cli.options import writable
from headrace.cli.output import say, status


def register(bench: typer.Typer) -> None:
    """Add the command."""
    add_measurement(
        bench,
        parallel,
        "modes cells rounds trace json_file",
        ("headrace bench parallel MODEL --modes pp2", "Two pipeline stages next to one process."),
        ("headrace bench parallel MODEL --modes pp2 --cells pp2048 --trace steps.svg", "And a picture of the steps."),
    )


def parallel(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A catalog name, a GGUF file, a folder, or a repository of the hub.")
    ],
    modes: Annotated[str, typer.Option(help="Modes, such as pp2 (two pipeline stages).")] = "pp2",
    cells: Annotated[str, typer.Option(help="Cells to measure: pp512, pp2048, b1, b8, b16 (default: all).")] = "",
    rounds: Rounds = 5,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw the last pipeline's steps of the first cell.", callback=writable),
    ] = None,
    *,
    save: Callable[[Any], None],
) -> Measurement:
    """Measure modes with one thread per process next to one process with one thread and with a thread per core.

    All modes must give the same tokens. Prompts run in chunks of 256 tokens. predicted: tokens per second if the stages of a
    pipeline lost no time between their steps. idle: share of the stages' time in which they did nothing.
    """
    from headrace.bench import parallel as bench

    wanted = [name.strip() for name in cells.split(",") if name.strip()] or list(bench.CELLS)
    if unknown := [name for name in wanted if name not in bench.CELLS]:
        raise ValueError(f"there is no cell {unknown[0]!r}; choose from {', '.join(bench.CELLS)}")
    chosen = [mode.strip() for mode in modes.split(",") if mode.strip()]
    if trace is not None and not any("pp" in mode for mode in chosen):
        raise ValueError("--trace draws the steps of a pipeline; add a mode such as pp2")
    for mode in chosen:
        bench.settings_of(mode)
    status().start("measuring", len(wanted), unit="cells")
    result = bench.measure(model, chosen, [bench.CELLS[name] for name in wanted], rounds, say, lambda *_: status().advance(1))
    rows = [
        {"mode": mode, "cell": cell} | figures
        for cell, found in result["cells"].items()
        for mode, figures in found["modes"].items()
    ]
    if trace is not None:
        drawn = next(row for row in reversed(rows) if row["cell"] == wanted[0] and "trace" in row)
        trace.write_text(bench.picture(drawn["trace"], f"{drawn['cell']}, {drawn['mode']}"), "utf-8")
    return Measurement(result, [Table(bench.COLUMNS, rows)])
