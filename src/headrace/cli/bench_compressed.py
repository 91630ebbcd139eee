"""bench compressed: quality, size and speed of compressed models."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.figures import Measurement
from headrace.cli.measuring import Rounds, Threads, add_measurement
from headrace.cli.options import writable
from headrace.cli.output import say, status


def register(bench: typer.Typer) -> None:
    """Add the command."""
    add_measurement(
        bench,
        compressed,
        "text tasks page json_file cells rounds",
        (
            "headrace bench compressed MODEL a.gguf b.gguf --text valid.txt --page page.html",
            "Size, perplexity, KL, tokens/s and memory of three models.",
        ),
        (
            "headrace bench compressed MODEL OUT --text valid.txt --tasks arc.jsonl",
            "Also the share of questions that stay right.",
        ),
    )


def compressed(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The original model.")],
    outs: Annotated[list[str], typer.Argument(metavar="OUT...", help="Compressed models.")],
    text: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Text that was not used for calibration.")],
    tasks: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Questions with choices (.jsonl, .jsonl.gz); may be repeated."),
    ] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="Number of questions of each file (default: all).")] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the text, half of which are scored.")] = 8192,
    cells: Annotated[str, typer.Option(help="Cells of bench local to time.")] = "b1,b8,pp512",
    rounds: Rounds = 5,
    threads: Threads = None,
    seed: Annotated[int, typer.Option(help="Seed for choosing texts, as in compress.")] = 0,
    page: Annotated[
        Path | None, typer.Option(help="Write a page with tables and plots to this .html file.", callback=writable)
    ] = None,
    *,
    save: Callable[[Any], None],
) -> Measurement:
    """Compare compressed models with their original: size, perplexity, KL, questions, tokens/s in alternating runs, memory.

    Each model is timed in a process of its own. A model whose report says that it was calibrated on passages of the text is
    refused.
    """
    from headrace.bench import compressed as bench
    from headrace.bench import compressed_page as pages
    from headrace.bench.local import pick
    from headrace.bench.questions import read_choice_questions
    from headrace.cli.opening import fetch

    wanted = pick(cells)
    asked = {
        path.name.removesuffix(".gz").removesuffix(".jsonl"): read_choice_questions(path, questions) for path in tasks or ()
    }
    models = bench.open_all([str(fetch(name)) for name in (model, *outs)])

    result = bench.measure_compressed(
        models,
        text,
        asked,
        wanted,
        tell=status(),
        say=say,
        rounds=rounds,
        tokens=tokens,
        threads=threads,
        seed=seed,
        done=save,
    )
    status().finish()
    if page is not None:
        page.write_text(pages.page(result), "utf-8")
        say(f"the page: {page}")
    quality, speed = pages.tables(result)
    return Measurement(result, [quality, "", speed, "", *pages.summary(result)])
