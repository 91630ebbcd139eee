"""bench synthetic: a model file of a published shape with random weights."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.help import short_help
from headrace.cli.options import writable
from headrace.cli.output import say


def register(bench: typer.Typer) -> None:
    """Add the command."""
    bench.command(
        "synthetic",
        cls=short_help(
            "out weights layers",
            ("headrace bench synthetic config.json -o 8b.gguf", "A file as large and as fast as the model in Q4_K_M."),
            ("headrace bench synthetic qwen2.5-coder-1.5b -o two.gguf --layers 2", "The first layers alone."),
        ),
    )(synthetic)


def synthetic(
    shape: Annotated[
        str, typer.Argument(metavar="SHAPE", help="A catalog name (also not downloaded), or a config.json or its folder.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.gguf", help="File to write.", callback=writable)],
    weights: Annotated[
        str, typer.Option(help="Number format of the matrices: a mix (Q4_K_M) or one kind (Q8_0, BF16).")
    ] = "Q4_K_M",
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers (default: the shape's).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Write a model of a published shape with random weights, to measure speed and memory without its files.

    The file has the architecture, sizes and number formats of the model, and a vocabulary of bytes. Measure it with bench
    local, fit --check or another engine. Its text means nothing.
    """
    from headrace.bench.synthetic import write_synthetic
    from headrace.data.progress import human_size

    written = write_synthetic(shape, out, weights, layers, seed)
    config = written.config
    say(
        f"{out}: {config.architecture}, {config.num_layers} layers of {config.hidden_size}, {written.parameters:,} parameters, "
        f"{human_size(written.bytes)}, {written.bits:.2f} bits a parameter"
    )
