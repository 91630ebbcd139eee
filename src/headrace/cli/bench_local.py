"""bench local: how fast Headrace is on this machine."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.files import writable
from headrace.cli.output import print_table, say
from headrace.cli.status import status


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
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """Prefill of 512 and 2048 tokens, decoding at batch 1 to 32 and at contexts up to 8k, verifying 5 and 8 tokens, load time,
    memory. --beside: the same of two builds, in turns, and their ratios."""
    from headrace.bench import local as bench

    def done(result: dict[str, Any]) -> None:
        name, figures = list(result["cells"].items())[-1]
        against = f", {figures['ratio']:.3f} of the other build" if beside else ""
        say(f"{name}: {figures['tokens_per_s']:.1f} tokens/s{against}")
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=2) + "\n")
        status().advance(1)

    wanted = bench.pick(cells)
    status().start("measuring", len(wanted), unit="cells")
    given: dict[str, Any] = {"threads": threads, "setting": {"backend": backend}, "say": say, "done": done}
    if beside is not None:
        from headrace.bench.beside import PAIRS, compare_builds

        _print_beside(compare_builds(model, beside, wanted, pairs=PAIRS if rounds is None else rounds, **given))
    else:
        _print_alone(bench.measure_local(model, wanted, rounds=5 if rounds is None else rounds, **given))


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
    from headrace.bench.beside import FLOOR

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
