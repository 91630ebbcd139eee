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

    found = describe(path)
    found["missing"] = "" if template else missing(name)
    found["encoder"] = not (template or found["missing"]) and open_files(name, download=False).config.encoder
    if found["encoder"]:
        found["kv_bytes_per_token"] = None
    if template:
        if found["chat_template"] is None:
            raise ValueError(f"{found['path']} has no chat template")
        print(printable(found["chat_template"], keep="\n\t"))
    elif as_json:
        print(json.dumps(found, indent=2))
    else:
        print_fields(_fields(found))
        if tensors:
            rows = [
                (one["name"], one["type"], " × ".join(map(str, one["shape"])), str(one["bytes"])) for one in found["tensors"]
            ]
            print_table(("TENSOR", "TYPE", "SHAPE", "BYTES"), rows)


def _kv(kv: dict[str, int]) -> str:
    return f"{kv['float16']:,} bytes in 16 bit, {kv['float32']:,} in 32 bit, {kv['int8']:,} in int8, {kv['int4']:,} in int4"


def _fields(found: dict[str, Any]) -> list[tuple[str, str]]:
    def number(value: int | None, unit: str = "") -> str:
        return "unknown" if value is None else f"{value:,}{unit}"

    types = (f"{count:,} {kind}" for kind, count in found["types"].items())
    kv, no_kv = found["kv_bytes_per_token"], "none: an encoder reads each text as a whole" if found["encoder"] else "unknown"
    fields = [
        ("file", found["path"]),
        ("format", found["format"]),
        ("name", found["name"] or "unnamed"),
        ("architecture", found["architecture"] or "unknown"),
        ("licence", found["licence"] or "not stated"),
        ("parameters", f"{found['parameters']:,} in {human_size(found['bytes'])}, {found['bits']:.2f} bits each"),
        ("tensors", f"{len(found['tensors'])}: {', '.join(types)}"),
        ("layers", f"{number(found['layers'])}, hidden size {number(found['hidden_size'])}"),
        ("heads", f"{number(found['heads'])}, KV heads {number(found['kv_heads'])}, head size {number(found['head_dim'])}"),
        ("context", number(found["context_length"], " tokens")),
        ("KV per token", _kv(kv) if kv else no_kv),
        ("tokenizer", f"{found['tokenizer'] or 'unknown'}, {number(found['vocab_size'])} tokens"),
    ]
    if found["kv"]:
        fields.append(("K and V", f"{found['kv']}, unless another number format is asked for"))
    if found["compress"]:
        fields.insert(2, ("compressed", f"by headrace compress: {found['compress']}"))
    if found["quantised"]:
        asks = f", activations in 8 bits by {found['activations']}" if found["activations"] else ""
        fields[2:2] = [("quantised", found["quantised"] + asks), ("in the core", found["core"])]
    if found["sliding_window"]:
        window = number(found["sliding_window"], " tokens in some or all layers; K and V are kept for the whole context")
        fields.append(("window", window))
    fields.append(("runs here", f"no: {found['missing']}" if found["missing"] else "yes"))
    text = found["chat_template"]
    fields.append(("chat template", "none" if text is None else f"{len(text):,} characters (--template prints it)"))
    return fields
