"""bench masks: JSON schemas with known answers."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.help import short_help
from headrace.cli.output import print_table
from headrace.cli.status import status


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "",
        ("headrace bench masks schemas.jsonl --model smollm2-135m", "Schemas and instances, an object a line."),
    )
    bench.command("masks", cls=short)(masks)


def masks(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Schemas and instances, a JSON object a line (maskbench's form).", exists=True),
    ],
    model: Annotated[str, typer.Option(help="The model whose vocabulary is used.")],
    most: Annotated[int | None, typer.Option(min=1, help="Only so many schemas.")] = None,
    closed_objects: Annotated[
        bool, typer.Option("--closed-objects", help="Objects get only the properties that their schema lists, as by default.")
    ] = False,
) -> None:
    """How many JSON schemas can be held to, whether valid instances pass and invalid ones do not, and what a mask costs."""
    from headrace.bench.masks import measure_masks
    from headrace.startup.loading import open_model

    tokenizer, progress = open_model(model).tokenizer, status()
    with file.open("rb") as lines:
        progress.start("reading schemas", min(sum(1 for _ in lines), most or sys.maxsize), unit="schemas")
    result = measure_masks(file, tokenizer, most, lambda _: progress.advance(1), open_objects=not closed_objects)
    share = lambda count, of: f"{count} of {of} ({count / max(of, 1):.1%})"  # noqa: E731
    rows = [
        ("schemas served", share(result.served, result.schemas)),
        ("by the mask alone", share(result.alone, result.schemas)),
        ("valid instances refused", share(result.refused, result.valid)),
        ("invalid instances accepted", share(result.accepted, result.invalid)),
        ("compilation, median and slowest", _times(result.compile_s)),
        ("first mask, median and slowest", _times(result.mask_s)),
    ]
    print_table(("", ""), rows)
    for reason, count in result.reasons.most_common():
        print(f"not served: {count} × {reason}")
    if result.wrong:
        print(f"wrong: {', '.join(dict.fromkeys(result.wrong))}")


def _times(seconds: list[float]) -> str:
    ordered = sorted(seconds) or [0.0]
    return f"{ordered[len(ordered) // 2] * 1e3:.2f} ms, {ordered[-1] * 1e3:.1f} ms"
