"""bench local: how fast Headrace is on this machine."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.output import print_table, say


def local(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A catalog name, a GGUF file, a folder, a hub id.")],
    cells: Annotated[str, typer.Option(help="What to measure, as pp512,b1; every cell where not given.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of every cell, after one to warm up.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; every core where not given.")] = None,
    backend: Annotated[str, typer.Option(help="auto, native or torch.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Prefill of 512 and 2048 tokens, decoding at batch 1 to 32 and at contexts up to 8k, verifying 5 and 8 tokens, load time,
    memory."""
    from headrace.bench import local as bench

    def done(result: dict[str, Any]) -> None:
        name, figures = list(result["cells"].items())[-1]
        say(f"{name}: {figures['tokens_per_s']:.1f} tokens/s")
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=2) + "\n")

    wanted, setting = bench.pick(cells), {"backend": backend}
    result = bench.measure_local(model, wanted, rounds=rounds, threads=threads, setting=setting, say=say, done=done)
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
