"""inspect: describe a file of weights without loading it."""

import json
from typing import Annotated, Any

import typer

from headrace.cli.output import print_fields, print_table, printable
from headrace.data.progress import human_size


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(inspect)


def inspect(
    name: Annotated[
        str, typer.Argument(metavar="FILE", help="A .gguf file, a folder with safetensors, or the name of an installed model.")
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Print the chat template and nothing else.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show a model's architecture, tensors, number formats, KV bytes per token, tokenizer and chat template."""
    from headrace.weights.hub import resolve

    path = resolve(name, download=False)
    from headrace.startup.opening import open_files
    from headrace.startup.supported import missing
    from headrace.weights.describe import describe

    description = describe(path)
    description["missing"] = "" if template else missing(name)
    description["encoder"] = not (template or description["missing"]) and open_files(name, download=False).config.encoder
    if description["encoder"]:
        description["kv_bytes_per_token"] = None
    if template:
        if description["chat_template"] is None:
            raise ValueError(f"{description['path']} has no chat template")
        print(printable(description["chat_template"], keep="\n\t"))
    elif as_json:
        print(json.dumps(description, indent=2))
    else:
        print_fields(_fields(description))
        if tensors:
            rows = [
                (one["name"], one["type"], " × ".join(map(str, one["shape"])), str(one["bytes"]))
                for one in description["tensors"]
            ]
            print_table(("TENSOR", "TYPE", "SHAPE", "BYTES"), rows)


def _kv(kv: dict[str, int]) -> str:
    return f"{kv['float16']:,} bytes in 16 bit, {kv['float32']:,} in 32 bit, {kv['int8']:,} in int8, {kv['int4']:,} in int4"


def _fields(description: dict[str, Any]) -> list[tuple[str, str]]:
    def number(value: int | None, unit: str = "") -> str:
        return "unknown" if value is None else f"{value:,}{unit}"

    types = (f"{count:,} {kind}" for kind, count in description["types"].items())
    kv, no_kv = (
        description["kv_bytes_per_token"],
        "none: an encoder reads each text as a whole" if description["encoder"] else "unknown",
    )
    fields = [
        ("file", description["path"]),
        ("format", description["format"]),
        ("name", description["name"] or "unnamed"),
        ("architecture", description["architecture"] or "unknown"),
        ("licence", description["licence"] or "not stated"),
        (
            "parameters",
            f"{description['parameters']:,} in {human_size(description['bytes'])}, {description['bits']:.2f} bits each",
        ),
        ("tensors", f"{len(description['tensors'])}: {', '.join(types)}"),
        ("layers", f"{number(description['layers'])}, hidden size {number(description['hidden_size'])}"),
        (
            "heads",
            f"{number(description['heads'])}, KV heads {number(description['kv_heads'])}, head size {number(description['head_dim'])}",
        ),
        ("context", number(description["context_length"], " tokens")),
        ("KV per token", _kv(kv) if kv else no_kv),
        ("tokenizer", f"{description['tokenizer'] or 'unknown'}, {number(description['vocab_size'])} tokens"),
    ]
    if description["kv"]:
        fields.append(("K and V", f"{description['kv']}, unless another number format is asked for"))
    if description["compress"]:
        fields.insert(2, ("compressed", f"by headrace compress: {description['compress']}"))
    if description["quantised"]:
        asks = f", activations in 8 bits by {description['activations']}" if description["activations"] else ""
        fields[2:2] = [("quantised", description["quantised"] + asks), ("in the core", description["core"])]
    if description["sliding_window"]:
        window = number(description["sliding_window"], " tokens in some or all layers; K and V are kept for the whole context")
        fields.append(("window", window))
    fields.append(("runs here", f"no: {description['missing']}" if description["missing"] else "yes"))
    text = description["chat_template"]
    fields.append(("chat template", "none" if text is None else f"{len(text):,} characters (--template prints it)"))
    return fields
