"""bench speculate: what speculation gains on prompts of your own, and why."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.files import writable
from headrace.cli.help import short_help
from headrace.cli.options import ModelName, ModelOptions, with_groups
from headrace.cli.output import print_table, say
from headrace.cli.status import status

COLUMNS = ("task", "batch", "gamma", "accepted", "tokens/step", "c", "v", "predicted", "measured", "worst")
GRID_COLUMNS = ("cell", "plain tokens/s", "auto tokens/s", "ratio", "interval", "pairs", "accepted", "of drafted", "other load")
SWEEP = (1, 2, 4, 8, 16, 32)
GAMMAS, SWEEP_GAMMAS = (0, 1, 2, 4, 8), (0, 2, 4)
MOST_PROMPTS = 32  # of each task of the grid, whose largest batch is that


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "source prompts gamma batch sweep grid max_tokens json_file draft speculate",
        ("headrace bench speculate MODEL -i code.txt -i chat.txt --draft SMALLER", "What a draft model gains on two tasks."),
        ("headrace bench speculate MODEL -i chat.txt --speculate ngram --gamma 2 --gamma 4", "Prompt lookup, of two lengths."),
        ("headrace bench speculate MODEL -i chat.txt --grid", "Is auto ever slower than plain decoding?"),
    )
    bench.command("speculate", cls=short)(with_groups(speculate))


def speculate(
    model: ModelName,
    options: ModelOptions,
    source: Annotated[
        list[Path], typer.Option("--input", "-i", exists=True, dir_okay=False, help="Prompts, one a line: a task each file.")
    ],
    prompts: Annotated[int, typer.Option(min=1, help="How many of each task.")] = 5,
    gamma: Annotated[list[int] | None, typer.Option(min=0, max=16, help="Tokens drafted; 0: as the controller says.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, max=64, help="Sequences at once; may be repeated.")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Batches of 1, 2, 4, 8, 16 and 32 sequences.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of plain and speculative runs of each prompt.")] = 3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=2, help="Tokens of each answer at most.")] = 96,
    plot: Annotated[Path | None, typer.Option(help="Draw gamma against speed-up into this SVG file.")] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="Is auto ever slower? By batch, task and random text, and drafter.")
    ] = False,
    cells: Annotated[str, typer.Option(help="Cells of the grid: b1-*,b4-chat-none; all where not given.")] = "",
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of a cell of the grid that is close to the limit.")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """Plain and speculative decoding in turns: acceptance, tokens per step, costs, predicted and measured speed-up.

    c and v are what a draft step and a verification cost, in plain steps; the prediction is tokens / (gamma c + v). --grid
    says for each cell how fast auto is beside plain decoding, 1 being equal, and whether any is below 0.97.
    """
    from headrace.cli.opening import open_llm

    batches = tuple(batch or (SWEEP if sweep else (1,)))
    if plot is not None and not any(gamma or GAMMAS):
        raise typer.BadParameter("--plot draws gamma against speed-up; give a --gamma of 1 or more too")
    if options.speculate in ("off", "none"):
        raise typer.BadParameter("--speculate off leaves nothing to measure; name who drafts, as in --speculate ngram")
    if cells and not grid:
        raise typer.BadParameter("--cells names cells of the grid; give --grid too")
    llm: Any = open_llm(model, options)
    if grid:
        _grid(llm, options.draft is not None, source, cells, pairs, json_file)
        return
    _gains(llm, source, prompts, gamma, batches, rounds, max_tokens, plot, json_file)


def _gains(
    llm: Any,
    source: list[Path],
    prompts: int,
    gamma: list[int] | None,
    batches: tuple[int, ...],
    rounds: int,
    max_tokens: int,
    plot: Path | None,
    json_file: Path | None,
) -> None:
    from headrace.bench import speculation as bench
    from headrace.bench.plots import about
    from headrace.workflows.prompts import read_prompts, tokens_of

    tasks = {file.stem: [tokens_of(llm, text, True) for text in read_prompts(file, prompts)] for file in source}
    gammas = tuple(gamma or (SWEEP_GAMMAS if len(batches) > 1 else GAMMAS))
    status().start("measuring", len(tasks) * len(gammas) * len(batches), unit="rows")

    def report(line: str) -> None:
        say(line)
        status().advance(1)

    rows = bench.measure(llm, tasks, gammas=gammas, batches=batches, rounds=rounds, max_tokens=max_tokens, say=report)
    print_table(COLUMNS, [_cells(row) for row in rows])
    if plot is not None:
        plot.write_text(bench.svg(rows, about(llm.opened.name)), "utf-8")
    if json_file is not None:
        json_file.write_text(json.dumps([row.plain() for row in rows], indent=2) + "\n", "utf-8")


def _grid(llm: Any, draft: bool, source: list[Path], patterns: str, pairs: int, json_file: Path | None) -> None:
    from headrace.bench import grid
    from headrace.workflows.prompts import read_prompts, tokens_of

    texts = {
        file.stem: grid.Texts([tokens_of(llm, text, True) for text in read_prompts(file, MOST_PROMPTS)]) for file in source
    }
    texts[grid.RANDOM] = grid.random_texts(llm.tokenizer.vocab_size)
    wanted = grid.cells(list(texts), draft, patterns)

    def done(result: dict[str, Any]) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
        status().advance(1)

    status().start("measuring", len(wanted), unit="cells")

    result = grid.measure(llm, texts, wanted, few=min(grid.FEW, pairs), many=pairs, say=say, done=done)
    print_table(GRID_COLUMNS, [_grid_cells(name, each) for name, each in result["cells"].items()])


def _grid_cells(name: str, each: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{each['plain_tokens_per_s']:.1f}",
        f"{each['auto_tokens_per_s']:.1f}",
        f"{each['ratio']:.3f}" + ("" if each["reached"] else " (slower)"),
        "{:.3f} to {:.3f}".format(*each["interval"]),
        str(each["pairs"]),
        str(each["accepted"]),
        str(each["drafted"]),
        f"{each['others_cpu']:.0%}",
    )


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
