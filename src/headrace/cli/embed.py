"""Command embed: the vector of each text, one JSON line each."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.help import short_help
from headrace.cli.inputs import texts_of
from headrace.cli.opening import open_llm
from headrace.cli.options import ModelName, WeightOptions, with_groups
from headrace.cli.output import json_text, status
from headrace.data.progress import Progress

# Texts of one engine call.
BATCH = 64


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "file pooling prompt dimensions max_model_len threads",
        ('headrace embed MODEL "the mill" "a wheel"', "Two vectors, a JSON line each."),
        ("headrace embed MODEL --file texts.txt > vectors.jsonl", "File with one text per line."),
    )
    app.command(cls=short)(with_groups(embed))


def embed(
    model: ModelName,
    options: WeightOptions,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXTS", help="Texts (default: the lines of --file or stdin).")
    ] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="File with one text per line.")] = None,
    pooling: Annotated[
        str | None, typer.Option(help="Pooling: mean, last or first (default: as the model's files say).")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Name of the model's prompt before each text: query, document, … (default: the model's).")
    ] = None,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Number of leading values to keep.")] = None,
) -> None:
    """Turn texts into vectors of length 1: one JSON line each, {"text", "tokens", "embedding"}.

    Works with encoders (BERT, XLM-R, ModernBERT, …) and with the hidden states of any other model.
    """
    options.check()
    given = texts_of(texts, file)
    llm = open_llm(model, options)
    status().finish()
    # On a terminal, the output lines themselves show the progress.
    progress = Progress() if sys.stdout.isatty() else status()
    progress.start("embedding", len(given), unit="texts")
    for start in range(0, len(given), BATCH):
        part = given[start : start + BATCH]
        for text, output in zip(part, llm.embed(part, pooling=pooling, dimensions=dimensions, prompt_name=prompt), strict=True):
            line = {"text": text, "tokens": len(output.token_ids), "embedding": output.values}
            print(json_text(line), flush=True)
        progress.advance(len(part))
    progress.finish()
