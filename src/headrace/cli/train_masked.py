"""Command train-masked: train a small model that fills in blocks."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.help import short_help
from headrace.cli.interrupt import Interrupt, resumable
from headrace.cli.options import with_groups, writable_folder
from headrace.cli.output import say, status


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "out block steps seed threads",
        ("headrace train-masked numbers -o numbers", "A model that spells numbers, in a minute."),
        ("python -m benchmarks.refine numbers -i numbers/prompts.jsonl", "What its passes bring."),
    )
    app.command("train-masked", cls=short)(with_groups(train_masked))


def train_masked(
    task: Annotated[str, typer.Argument(metavar="TASK", help="reverse, numbers, or a text file for training.")],
    out: Annotated[Path, typer.Option("--out", "-o", file_okay=False, help="Output folder.", callback=writable_folder)],
    block: Annotated[int, typer.Option(min=1, max=64, help="Tokens per block.")] = 8,
    layers: Annotated[int, typer.Option(min=1, max=64, help="Layers.")] = 4,
    encoder_layers: Annotated[
        int, typer.Option(min=0, max=64, help="Layers of an encoder for the prompt; 0: a decoder alone.")
    ] = 0,
    width: Annotated[int, typer.Option(min=8, max=4096, help="Hidden size.")] = 96,
    heads: Annotated[int, typer.Option(min=1, max=64, help="Attention heads.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 600,
    batch: Annotated[int | None, typer.Option(min=1, help="Texts per step (default: chosen for one minute).")] = None,
    rate: Annotated[float, typer.Option(min=1e-6, help="Highest learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and texts.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Train a small model that fills blocks of masked tokens, to try non-autoregressive decoding.

    OUT is a model folder; OUT/prompts.jsonl has prompts that it can answer.
    """
    from headrace.training.masked import MaskedConfig
    from headrace.training.masked import train_masked as train
    from headrace.training.masked_tasks import task_named

    config = MaskedConfig(block, layers, encoder_layers, width, heads, steps, batch, rate, seed=seed, threads=threads)
    with resumable(out):
        seconds = train(task_named(task), config, out, status(), Interrupt())
    status().finish()
    say(f"trained for {seconds:.0f} s; the model is in {out}; use it with --raw --refine-block {block}")
