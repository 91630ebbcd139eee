"""Command merge: a model with an adapter added to its weights."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.help import short_help
from headrace.cli.options import ModelName, with_groups, writable, writable_folder
from headrace.cli.output import say, status


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "out requantise",
        ("headrace merge MODEL ./my-lora -o merged", "A folder that needs no adapter."),
        ("headrace merge model.gguf ./my-lora -o merged.gguf --requantise", "A GGUF file, in the formats of the model."),
    )
    app.command(cls=short)(with_groups(merge))


def _writable(out: Path) -> Path | None:
    return writable(out) if out.suffix == ".gguf" else writable_folder(out)


def merge(
    model: ModelName,
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", exists=True, help="LoRA adapter: a folder of peft, or a .gguf file.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Output: a folder, or FILE.gguf of a GGUF model.", callback=_writable)
    ],
    requantise: Annotated[
        bool, typer.Option("--requantise", help="Encode quantised tensors again, in their formats; rounds them a second time.")
    ] = False,
) -> None:
    """Add a LoRA adapter to a model's weights, and write the result as a folder or a GGUF file.

    MODEL is a folder of float weights, or a GGUF file. Sums are float32, rounded once to the type of each tensor.
    """
    if out.suffix == ".gguf":
        from headrace.compress.merge_adapter import merge_gguf
        from headrace.startup.merging import open_to_merge

        changed = merge_gguf(*open_to_merge(model, adapter), out, requantise=requantise)
    else:
        from headrace.startup.merging import merge as write_merged

        changed = write_merged(model, adapter, out)
    status().finish()
    say(f"{changed} tensors changed; the model is in {out}")
