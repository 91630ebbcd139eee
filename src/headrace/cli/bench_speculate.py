"""bench speculate: what speculation gains on prompts of your own, and why."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.options import ModelName, ModelOptions, with_groups
from headrace.cli.output import print_table, say

COLUMNS = ("task", "batch", "gamma", "accepted", "tokens/step", "c", "v", "predicted", "measured", "worst")


def register(bench: typer.Typer) -> None:
    """Add the command."""
    bench.command("speculate")(with_groups(speculate))


def speculate(
    model: ModelName,
    options: ModelOptions,
    source: Annotated[
        list[Path], typer.Option("--input", "-i", exists=True, dir_okay=False, help="Prompts, one a line: a task each file.")
    ],
    prompts: Annotated[int, typer.Option(min=1, help="How many of each task.")] = 5,
    gamma: Annotated[list[int] | None, typer.Option(min=0, max=16, help="Tokens drafted; 0: as the controller says.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, max=64, help="Sequences at once; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of plain and speculative runs of each prompt.")] = 3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=2, help="Tokens of each answer at most.")] = 96,
    plot: Annotated[Path | None, typer.Option(help="Draw gamma against speed-up into this SVG file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Plain and speculative decoding in turns: acceptance, tokens per step, costs, predicted and measured speed-up.

    c and v are what a draft step and a verification cost, in plain steps; the prediction is tokens / (gamma c + v).
    """
    from headrace.bench import speculation as bench
    from headrace.bench.prompts import read_prompts, tokens_of
    from headrace.cli.opening import open_llm

    batches = tuple(batch or (1,))
    gammas = tuple(gamma or (0, 1, 2, 4, 8))
    if plot is not None and not any(gammas):
        raise typer.BadParameter("--plot draws gamma against speed-up; give a --gamma of 1 or more too")
    if options.speculate in ("off", "none"):
        raise typer.BadParameter("--speculate off leaves nothing to measure; name who drafts, as in --speculate ngram")
    llm: Any = open_llm(model, options, max_num_seqs=max(batches))
    tasks = {file.stem: [tokens_of(llm, text, True) for text in read_prompts(file, prompts)] for file in source}
    rows = bench.measure(llm, tasks, gammas=gammas, batches=batches, rounds=rounds, max_tokens=max_tokens, say=say)
    print_table(COLUMNS, [_cells(row) for row in rows])
    if plot is not None:
        plot.write_text(bench.svg(rows), "utf-8")
    if json_file is not None:
        json_file.write_text(json.dumps([row.plain() for row in rows], indent=2) + "\n", "utf-8")


def _cells(row: Any) -> tuple[str, ...]:
    return (
        row.task,
        str(row.batch),
        str(row.gamma or "auto"),
        f"{row.acceptance:.0%}",
        f"{row.tokens:.2f}",
        f"{row.c:.2f}",
        f"{row.v:.2f}",
        f"{row.predicted:.2f}x",
        f"{row.measured:.2f}x",
        f"{row.worst:.2f}x",
    )
