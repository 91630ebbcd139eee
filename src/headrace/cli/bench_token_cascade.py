"""bench token-cascade: a smaller model that writes some of the tokens, beside the same one as a draft."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.files import writable
from headrace.cli.help import short_help
from headrace.cli.options import ModelName, ModelOptions, with_groups
from headrace.cli.output import print_table, say
from headrace.cli.status import status

COLUMNS = ("way", "by the smaller", "the larger's choice", "likeness", "passes a token", "tokens/s", "beside plain", "rounds")


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "cascade source threshold defer prompts rounds max_tokens json_file plot",
        (
            "headrace bench token-cascade LARGE --cascade SMALLER -i code.jsonl",
            "Does leaving tokens to a smaller model beat a draft by it?",
        ),
    )
    bench.command("token-cascade", cls=short)(with_groups(token_cascade))


def token_cascade(
    model: ModelName,
    options: ModelOptions,
    source: Annotated[
        Path, typer.Option("--input", "-i", exists=True, dir_okay=False, help="Prompts, one a line, or JSON lines.")
    ],
    threshold: Annotated[
        list[float] | None, typer.Option(min=0, max=1.01, help="Of cascades by token; may be repeated.")
    ] = None,
    defer: Annotated[
        list[float] | None, typer.Option(min=-1, max=1, help="--defer-at of speculative cascades; may be repeated.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many of the file.")] = 10,
    batch: Annotated[int, typer.Option(min=1, max=64, help="Sequences at once, where time is measured.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all ways take turns.")] = 3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=2, help="Tokens of each answer at most.")] = 96,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw agreement over speed into this SVG file.", callback=writable)] = None,
) -> None:
    """Cascades by token and speculative cascades over thresholds, beside plain decoding and a draft by the same smaller model.

    A draft changes no token, so it is the bar: what is not faster than it gives tokens up for nothing.
    """
    if options.cascade is None:
        raise typer.BadParameter("bench token-cascade needs a smaller model of the same vocabulary: --cascade MODEL")
    if options.draft is not None or options.amateur is not None:
        raise typer.BadParameter("the model of --cascade is draft and amateur, too; leave --draft and --amateur out")
    from headrace.bench import token_cascade as bench
    from headrace.bench.plots import about, draw
    from headrace.cli.opening import open_llm
    from headrace.training.heads import prompt_tokens
    from headrace.workflows.prompts import read_prompts

    texts = read_prompts(source, prompts)
    llm: Any = open_llm(model, replace(options, draft=options.cascade, amateur=options.cascade, speculate="draft"))
    status().start("measuring")
    each = bench.ways(max_tokens, threshold or bench.THRESHOLDS, defer or bench.DEFER)
    found = bench.measure(llm, [prompt_tokens(llm, text) for text in texts], each, batch=batch, rounds=rounds, say=say)
    llm.close()
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    if plot is not None:
        name = f"{Path(model).name} with {Path(options.cascade).name}"
        title = "Tokens left to a smaller model"
        plot.write_text(draw(title, "times as fast as plain", "the larger's choice, percent", bench.lines(found), about(name)))
    print_table(COLUMNS, [_cells(row) for row in found["rows"]])
    print(bench.verdict(found))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        "" if row["smaller"] is None else f"{row['smaller']:.1%}",
        f"{row['agrees']:.1%}",
        f"{row['likeness']:.3f}",
        f"{row['passes']:.2f}",
        f"{row['speed']:.1f}",
        f"{row['ratio']:.2f}x",
        f"{min(row['ratios']):.2f}..{max(row['ratios']):.2f}",
    )
