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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a model's architecture, tensors, number formats, KV bytes per token, tokenizer and chat template."""
    from headrace.weights.hub import resolve

    path = resolve(name, download=False)
    from headrace.startup.opening import open_files
    from headrace.startup.supported import missing_requirement
    from headrace.weights.describe import describe

    model = describe(path)
    model["missing"] = "" if template else missing_requirement(name)
    model["encoder"] = not (template or model["missing"]) and open_files(name, download=False).config.encoder
    if model["encoder"]:
        model["kv_bytes_per_token"] = None
    if template:
        if model["chat_template"] is None:
            raise ValueError(f"{model['path']} has no chat template")
        print(printable(model["chat_template"], keep="\n\t"))
    elif as_json:
        print(json.dumps(model, indent=2))
    else:
        print_fields(_fields(model))
        if tensors:
            rows = [
                (one["name"], one["type"], " × ".join(map(str, one["shape"])), str(one["bytes"])) for one in model["tensors"]
            ]
            print_table(("TENSOR", "TYPE", "SHAPE", "BYTES"), rows)


def _kv(kv: dict[str, int]) -> str:
    return f"{kv['float16']:,} bytes in 16 bit, {kv['float32']:,} in 32 bit, {kv['int8']:,} in int8, {kv['int4']:,} in int4"


def _fields(model: dict[str, Any]) -> list[tuple[str, str]]:
    def number(value: int | None, unit: str = "") -> str:
        return "unknown" if value is None else f"{value:,}{unit}"

    types = (f"{count:,} {kind}" for kind, count in model["types"].items())
    kv = model["kv_bytes_per_token"]
    no_kv = "none: an encoder reads each text as a whole" if model["encoder"] else "unknown"
    fields = [
        ("file", model["path"]),
        ("format", model["format"]),
        ("name", model["name"] or "unnamed"),
        ("architecture", model["architecture"] or "unknown"),
        ("licence", model["licence"] or "not stated"),
        (
            "parameters",
            f"{model['parameters']:,} in {human_size(model['bytes'])}, {model['bits']:.2f} bits each",
        ),
        ("tensors", f"{len(model['tensors'])}: {', '.join(types)}"),
        ("layers", f"{number(model['layers'])}, hidden size {number(model['hidden_size'])}"),
        (
            "heads",
            f"{number(model['heads'])}, KV heads {number(model['kv_heads'])}, head size {number(model['head_dim'])}",
        ),
        ("context", number(model["context_length"], " tokens")),
        ("KV per token", _kv(kv) if kv else no_kv),
        ("tokenizer", f"{model['tokenizer'] or 'unknown'}, {number(model['vocab_size'])} tokens"),
    ]
    if model["kv"]:
        fields.append(("K and V", f"{model['kv']}, unless another number format is asked for"))
    if model["compress"]:
        fields.insert(2, ("compressed", f"by headrace compress: {model['compress']}"))
    if model["quantised"]:
        asks = f", activations in 8 bits by {model['activations']}" if model["activations"] else ""
        fields[2:2] = [("quantised", model["quantised"] + asks), ("in the core", model["core"])]
    if model["sliding_window"]:
        window = number(model["sliding_window"], " tokens in some or all layers; K and V are kept for the whole context")
        fields.append(("window", window))
    fields.append(("runs here", f"no: {model['missing']}" if model["missing"] else "yes"))
    text = model["chat_template"]
    fields.append(("chat template", "none" if text is None else f"{len(text):,} characters (--template prints it)"))
    return fields
