"""bench sharing: KV memory of parallel samples and beams."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headrace.bench.figures import Measurement, Table
from headrace.cli.measuring import add_measurement
from headrace.cli.output import say, status
from headrace.data.progress import counted


def register(bench: typer.Typer) -> None:
    """Add the command."""
    example = "headrace bench sharing MODEL -i prompts.txt", "Blocks of 2, 4 and 6 samples and beams."
    add_measurement(bench, sharing, "", example)


def sharing(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A catalog name, a GGUF file, a folder, or a repository of the hub.")
    ],
    source: Annotated[Path, typer.Option("--input", "-i", exists=True, dir_okay=False, help="Prompts, one per line.")],
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 16,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Most tokens of an answer.")] = 64,
    chat: Annotated[bool, typer.Option(help="Use the chat template.")] = False,
) -> Measurement:
    """Count KV blocks of parallel samples and of beams with and without sharing, on the same prompts."""
    from headrace.bench import sharing as bench
    from headrace.cli.opening import open_llm
    from headrace.cli.options import ModelOptions
    from headrace.workflows.prompts import read_prompts, tokens_of

    llm = open_llm(model, ModelOptions(), max_num_seqs=max(bench.WIDTHS))
    ids = [tokens_of(llm, text, chat) for text in read_prompts(source, prompts)]
    status().start("measuring")
    rows = bench.measure(llm, ids, max_tokens)
    mean = sum(map(len, ids)) / len(ids)
    say(f"{counted(len(ids), 'prompts')} of {mean:.0f} tokens on average, answers of {max_tokens} at most, blocks of 16 tokens")
    return Measurement([asdict(row) for row in rows], [Table(bench.COLUMNS, rows)])
