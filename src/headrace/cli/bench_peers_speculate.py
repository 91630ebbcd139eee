"""bench peers-speculate: speculation beside that of other engines."""

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
        "draft source engines install rounds threads json_file",
        (
            "headrace bench peers-speculate MODEL --draft SMALLER -i code.txt --install",
            "Beside two others.",
        ),
    )
    bench.command("peers-speculate", cls=short)(with_groups(peers_speculate))


def peers_speculate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, or a catalog name that has one.")],
    draft: Annotated[str, typer.Option(help="A smaller model of the same vocabulary, in GGUF.")],
    source: Annotated[
        list[Path], typer.Option("--input", "-i", exists=True, dir_okay=False, help="Prompts, one a line: a task each file.")
    ],
    engines: Annotated[str, typer.Option(help="Beside whom: openvino, llama.cpp.")] = "openvino,llama.cpp",
    install: Annotated[bool, typer.Option("--install", help="Install or build what is missing.")] = False,
    kinds: Annotated[str, typer.Option(help="draft, lookup, or both.")] = "draft,lookup",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of every engine in every cell, a prompt each.")] = 5,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=2, help="Tokens of each answer at most.")] = 64,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of every engine; every core where not given.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """Speculation with a draft model and by prompt lookup beside OpenVINO GenAI's and llama.cpp's, in turns, in one run.

    Batch 1, greedy, tokens/s after the first token. Other engines are tried with two settings each, and the better one counts.
    """
    from headrace.bench import peers_speculation as bench
    from headrace.workflows.prompts import read_prompts

    beside = [name.strip() for name in engines.split(",") if name.strip()]
    wanted = [name.strip() for name in kinds.split(",") if name.strip()]
    if not wanted or set(wanted) - set(bench.KINDS):
        raise typer.BadParameter(f"--kinds takes {' and '.join(bench.KINDS)}, not {kinds!r}")
    bench.make_ready(beside, install, say)
    tasks = {file.stem: read_prompts(file, rounds) for file in source}

    def done(result: dict[str, Any]) -> None:
        name, figures = list(result["cells"].items())[-1]
        say(f"{name}: {figures['tokens_per_s']:.1f} tokens/s" + (f", {figures['ratio']:.2f} times the best" if beside else ""))
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=2) + "\n")

    status().start("measuring")
    result = bench.compare(
        model,
        draft,
        tasks,
        engines=beside,
        kinds=wanted,
        rounds=rounds,
        new_tokens=max_tokens,
        threads=threads,
        say=say,
        done=done,
    )
    columns = ("task", "headrace", *beside, "ratio to the best", "interval", "same first token", "other load")
    print_table(columns, [_row(name, figures, beside) for name, figures in result["cells"].items()])


def _row(cell: str, figures: dict[str, Any], engines: list[str]) -> tuple[str, ...]:
    peers = figures["peers"]
    speeds = [f"{peers[name]['tokens_per_s']:.1f} ({peers[name]['setting']})" for name in engines]
    ratio = (f"{figures['ratio']:.2f}", "{:.2f} to {:.2f}".format(*figures["interval"])) if peers else ("-", "-")
    same = " ".join(f"{peers[name]['same_first_token']:.0%}" for name in engines)
    return (cell, f"{figures['tokens_per_s']:.1f}", *speeds, *ratio, same, f"{figures['others_cpu']:.0%}")
