"""bench speculate: gain of speculation on the user's prompts, and its parts."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.figures import Measurement, Plot, Table, named
from headrace.cli.measuring import add_measurement
from headrace.cli.options import ModelName, ModelOptions
from headrace.cli.output import say, status

SWEEP = (1, 2, 4, 8, 16, 32)
GAMMAS, SWEEP_GAMMAS = (0, 1, 2, 4, 8), (0, 2, 4)
# Prompts of each task of the grid: its largest batch.
MOST_PROMPTS = 32


def register(bench: typer.Typer) -> None:
    """Add the command."""
    add_measurement(
        bench,
        speculate,
        "source prompts gamma batch sweep grid max_tokens json_file draft speculate",
        ("headrace bench speculate MODEL -i code.txt -i chat.txt --draft SMALLER", "Gain of a draft model on two tasks."),
        (
            "headrace bench speculate MODEL -i chat.txt --speculate ngram --gamma 2 --gamma 4",
            "Prompt lookup with two draft lengths.",
        ),
        ("headrace bench speculate MODEL -i chat.txt --grid", "Check that auto is not slower than plain decoding."),
        plot="Draw gamma against speed-up into this SVG file.",
    )


def speculate(
    model: ModelName,
    options: ModelOptions,
    source: Annotated[
        list[Path],
        typer.Option("--input", "-i", exists=True, dir_okay=False, help="Prompts, one per line; each file is a task."),
    ],
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per task.")] = 5,
    gamma: Annotated[
        list[int] | None, typer.Option(min=0, max=16, help="Tokens of a draft; 0: chosen by the drafting policy.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, max=64, help="Batch size; may be repeated.")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Use batches of 1, 2, 4, 8, 16 and 32 sequences.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of plain and speculative runs per prompt.")] = 3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=2, help="Most tokens of an answer.")] = 96,
    grid: Annotated[bool, typer.Option("--grid", help="Measure a grid of batches, tasks, random text and drafters.")] = False,
    cells: Annotated[str, typer.Option(help="Cells of the grid, such as b1-*,b4-chat-none (default: all).")] = "",
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs for a cell that is close to the limit.")] = 15,
    *,
    save: Callable[[Any], None],
    with_plot: bool,
) -> Measurement:
    """Compare plain and speculative decoding in alternating runs: acceptance, tokens per step, costs, predicted and measured
    speed-up.

    c and v are the costs of a draft step and of a verification in plain steps; the predicted speed-up is tokens / (gamma c +
    v). --grid prints for each cell the speed of auto relative to plain decoding, and whether any is below 0.97.
    """
    from headrace.cli.opening import open_llm

    batches = tuple(batch or (SWEEP if sweep else (1,)))
    if with_plot and not any(gamma or GAMMAS):
        raise typer.BadParameter("--plot draws gamma against speed-up; give a --gamma of 1 or more too")
    if options.speculate in ("off", "none"):
        raise typer.BadParameter("--speculate off leaves nothing to measure; name a drafter, as in --speculate ngram")
    if cells and not grid:
        raise typer.BadParameter("--cells names cells of the grid; give --grid too")
    llm: Any = open_llm(model, options)
    if grid:
        return _grid(llm, options.draft is not None, source, cells, pairs, save)
    return _gains(llm, source, prompts, gamma, batches, rounds, max_tokens, with_plot)


def _gains(
    llm: Any,
    source: list[Path],
    prompts: int,
    gamma: list[int] | None,
    batches: tuple[int, ...],
    rounds: int,
    max_tokens: int,
    with_plot: bool,
) -> Measurement:
    from headrace.bench import speculation as bench
    from headrace.workflows.prompts import read_prompts, tokens_of

    tasks = {file.stem: [tokens_of(llm, text, True) for text in read_prompts(file, prompts)] for file in source}
    gammas = tuple(gamma or (SWEEP_GAMMAS if len(batches) > 1 else GAMMAS))
    status().start("measuring", len(tasks) * len(gammas) * len(batches), unit="rows")

    def report(line: str) -> None:
        say(line)
        status().advance(1)

    rows = bench.measure(llm, tasks, gammas=gammas, batches=batches, rounds=rounds, max_tokens=max_tokens, say=report)
    axes = "Speed-up by drafting; dashed: theory", "tokens drafted (gamma)", "times as fast"
    plot = Plot(*axes, bench.lines(rows), llm.opened.name) if with_plot else None
    return Measurement([asdict(row) for row in rows], [Table(bench.COLUMNS, rows)], plot)


def _grid(llm: Any, draft: bool, source: list[Path], patterns: str, pairs: int, save: Callable[[Any], None]) -> Measurement:
    from headrace.bench import grid
    from headrace.workflows.prompts import read_prompts, tokens_of

    texts = {
        file.stem: grid.Texts([tokens_of(llm, text, True) for text in read_prompts(file, MOST_PROMPTS)]) for file in source
    }
    texts[grid.RANDOM] = grid.random_texts(llm.tokenizer.vocab_size)
    wanted = grid.cells(list(texts), draft, patterns)

    def done(result: dict[str, Any]) -> None:
        save(result)
        status().advance(1)

    status().start("measuring", len(wanted), unit="cells")
    result = grid.measure(llm, texts, wanted, few=min(grid.FEW, pairs), many=pairs, say=say, done=done)
    return Measurement(result, [Table(grid.COLUMNS, named(result["cells"], "cell"))])
