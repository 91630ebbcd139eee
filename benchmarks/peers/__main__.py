"""`python -m benchmarks.peers`: the speed of Headrace and of other engines."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run
from benchmarks.peers import engines as peer_engines
from benchmarks.peers.comparison import compare
from benchmarks.peers.record import RECORD, keep
from headrace.bench import interleave as bench_cells
from headrace.cli.options import writable
from headrace.cli.output import print_table, say, status

# Share of the cores that other processes may use before a cell is reported as disturbed.
QUIET = 0.05


def peers(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, or a catalog name that has one.")],
    engines: Annotated[str, typer.Option(help="Beside whom: llama.cpp, ort, openvino, vllm.")] = "llama.cpp,ort,openvino",
    programs: Annotated[
        list[str] | None,
        typer.Option(
            "--program", metavar="NAME=COMMAND", help="Beside a llama-batched-bench of your own, with its best options."
        ),
    ] = None,
    install: Annotated[bool, typer.Option("--install", help="Install missing engines, each in its own environment.")] = False,
    cells: Annotated[str, typer.Option(help="What to measure, as pp512,b1; every cell where not given.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of every engine in every cell.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of every engine; every core where not given.")] = None,
    backend: Annotated[str, typer.Option(help="Our back end.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
    record: Annotated[
        str,
        typer.Option(metavar="MACHINE", help="Keep the figures under this name of the machine, for the tables of the pages."),
    ] = "",
) -> None:
    """Headrace beside other engines, in turns, in one run: tokens/s, ratios to the best of them, memory bandwidth."""
    chosen, wanted = peer_engines.pick(engines), bench_cells.pick(cells)
    peer_engines.make_ready(chosen, install, say)
    chosen += peer_engines.built(programs or [])

    def done(result: dict[str, Any]) -> None:
        name, figures = list(result["cells"].items())[-1]
        say(_line(name, figures))
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=2) + "\n")
        if record:
            keep(RECORD, record, result)

    setting = {"backend": backend}
    status().start("measuring")
    result = compare(model, chosen, wanted, rounds=rounds, threads=threads, setting=setting, say=say, done=done)
    names = [engine.name for engine in chosen]
    columns = ("cell", "headrace", *names, "ratio to the best", "interval", "of the limit", "GB/s", "other load")
    print_table(columns, [_row(name, figures, names) for name, figures in result["cells"].items()])


def _row(cell: str, figures: dict[str, Any], engines: list[str]) -> tuple[str, ...]:
    peers = figures["peers"]
    speeds = [f"{peers[name]['tokens_per_s']:.1f}" if name in peers else "-" for name in engines]
    ratio = (f"{figures['ratio']:.2f}", "{:.2f} to {:.2f}".format(*figures["interval"])) if peers else ("-", "-")
    around = (f"{figures['share']:.0%} {figures['limit']}", f"{figures['bandwidth_gb_s']:.1f}", f"{figures['others_cpu']:.0%}")
    return (cell, f"{figures['tokens_per_s']:.1f}", *speeds, *ratio, *around)


def _line(cell: str, figures: dict[str, Any]) -> str:
    against = f", {figures['ratio']:.2f} times {figures['best_peer']}" if figures["peers"] else ""
    disturbed = " (other processes took CPU time: measure again)" if figures["others_cpu"] > QUIET else ""
    return f"{cell}: {figures['tokens_per_s']:.1f} tokens/s{against}{disturbed}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    examples = (
        ("smollm2-135m --install", "Beside llama.cpp, ONNX Runtime GenAI and OpenVINO GenAI."),
        ("MODEL --engines llama.cpp --cells b1,b8", "One engine, two cells."),
        ("MODEL --record 'Zen 4'", "Keep the figures; `python -m tests.pages speed speed-readme` writes the tables."),
    )
    return run(peers, "peers", argv, examples)


if __name__ == "__main__":
    sys.exit(main())
