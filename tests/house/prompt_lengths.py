"""A measurement of one's own: tokens of each prompt, in a file of twenty lines."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.bench.figures import Column, Line, Measurement, Plot, Table
from headrace.cli.measuring import add_measurement

COLUMNS = (Column("prompt", "{prompt}"), Column("tokens", "{tokens:d}"), Column("letters a token", "{letters:.2f}"))


def prompt_lengths(model: str, source: Annotated[Path, typer.Option("--input", "-i", exists=True)]) -> Measurement:
    """Tokens of each prompt."""
    from headrace.startup.opening import open_model

    tokenizer, rows = open_model(model).tokenizer, []
    for prompt in source.read_text().splitlines():
        rows.append({"prompt": prompt, "tokens": (count := len(tokenizer.encode(prompt))), "letters": len(prompt) / count})
    line = Line("tokens", range(len(rows)), [row["tokens"] for row in rows])
    return Measurement(rows, [Table(COLUMNS, rows)], Plot("Prompts", "number", "tokens", [line], model))


def register(bench: typer.Typer) -> None:
    add_measurement(bench, prompt_lengths, "", ("headrace bench prompt-lengths MODEL -i FILE", "All."), plot="Draw them.")
