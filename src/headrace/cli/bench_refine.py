"""bench refine: filling in blocks beside decoding token by token."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.files import writable
from headrace.cli.help import short_help
from headrace.cli.options import ModelName, ModelOptions, with_groups
from headrace.cli.output import print_table, say


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "source block passes most max_tokens json_file",
        ("headrace bench refine numbers -i numbers/prompts.jsonl", "A model of headrace train-masked, by passes."),
    )
    bench.command("refine", cls=short)(with_groups(refine))


def refine(
    model: ModelName,
    source: Annotated[
        Path,
        typer.Option(
            "--input", "-i", exists=True, dir_okay=False, help='JSON lines: "prompt", perhaps "answers" (or "answer").'
        ),
    ],
    block: Annotated[int, typer.Option(min=1, max=64, help="Tokens of a block.")] = 8,
    passes: Annotated[str, typer.Option(help="Passes over a block, as in 1,2,4,8.")] = "1,2,4,8",
    most: Annotated[int | None, typer.Option(min=1, help="Only so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Tokens of an answer at most.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the fastest counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """Filling in blocks beside decoding token by token: tokens a step, right answers and time, by passes.

    A model with a mask token is needed: headrace train-masked makes small ones.
    """
    from headrace.bench import refine as bench
    from headrace.cli.opening import open_llm

    try:
        numbers = [int(one) for one in passes.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--passes takes numbers, as in 1,2,4,8, not {passes!r}") from None
    questions = bench.read_questions(source, most)
    llm = open_llm(model, ModelOptions(threads=threads, speculate="off"))
    measured = bench.measure(llm, questions, block, numbers, max_tokens, rounds)
    llm.close()
    if json_file is not None:
        json_file.write_text(json.dumps(bench.figures(measured), indent=2) + "\n", "utf-8")
    rows = [
        (
            *(one.way, "-" if one.right is None else f"{one.right:.1%}", f"{one.agree:.1%}"),
            *(f"{one.tokens_per_step:.2f}", f"{one.speed:.2f}"),
        )
        for one in measured
    ]
    print_table(("passes", "right", f"as {block} passes", "tokens a step", "speed"), rows)
    say(f"{len(questions)} prompts in one batch; a block's causal pass, which keeps its tokens, counts as a step")
