"""compress: write a model again in fewer bytes."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.files import writable
from headrace.cli.options import ModelName
from headrace.cli.output import print_fields, print_table, say
from headrace.cli.status import status
from headrace.weights.progress import human_size


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(compress)


def compress(
    model: ModelName,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The .gguf file to write, or a folder (2:4).", callback=writable)
    ] = None,
    number_format: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            help="F16, BF16, Q8_0, Q6_K, Q5_K_M, Q5_K_S, Q4_K_M, Q4_K_S, IQ4_NL, Q4_1, Q4_0, Q3_K_L, Q3_K_M, Q3_K_S, Q2_K …: "
            "as llama.cpp names them. Of a folder int4-g32-sym or int8-g32-sym.",
        ),
    ] = "Q4_K_M",
    method: Annotated[
        str,
        typer.Option(
            help="rtn: each number to the nearest of its block. Before that, magnitude: the smallest weights of each layer "
            "become 0; wanda: those of the smallest weight times input (--imatrix)."
        ),
    ] = "rtn",
    sparsity: Annotated[
        str | None, typer.Option(help="How many become 0: 2:4 (two of each four neighbours), or a share of each row as 0.5.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="Another kind for the output projection, as in Q8_0.")] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="How much each input counts: a file of llama-imatrix, GGUF or .dat."),
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads (0: one for each core).")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT where it exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")] = False,
    matrices: Annotated[bool, typer.Option("--matrices", help="List every tensor: kind, bytes, error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Write a model as a GGUF file with numbers in fewer bits, each rounded to the nearest that its block can have.

    MODEL is a .gguf file, or a folder with safetensors of a Llama, Mistral, Qwen2, Qwen3 or GPT-2. One matrix is in memory at a
    time. A folder OUT holds two of each four weights. `headrace perplexity` on both models says how much was lost.
    """
    if out is None and not dry_run:
        raise typer.BadParameter("give a file to write with -o OUT.gguf, or --dry-run")
    if out is not None and not dry_run and out.exists() and not overwrite:
        raise ValueError(f"{out} exists; give another name, or --overwrite")

    from headrace.cli.opening import fetch

    path = fetch(model)

    from headrace.compress.run import Pipeline

    pipeline = Pipeline(format=number_format, method=method, sparsity=sparsity, head=head, imatrix=imatrix, threads=threads)
    report = _predicted(path, out, pipeline) if dry_run or out is None else _written(path, out, pipeline, overwrite)
    status().finish()
    if as_json:
        print(json.dumps(_record(report), indent=2))
        return
    print_fields(_fields(report, None if dry_run else out, path))
    if matrices:
        print_table(("TENSOR", "KIND", "BYTES", "ERROR"), _rows(report))


def _predicted(path: Path, out: Path | None, pipeline: Any) -> Any:
    from headrace.compress import folder, run

    as_folder = out.suffix != ".gguf" if out is not None else pipeline.format.lower() in folder.FORMATS
    report = folder.prepare_folder(path, pipeline).report if as_folder else run.predict(path, pipeline)
    for line in report.warnings:
        say(line)
    return report


def _written(path: Path, out: Path, pipeline: Any, overwrite: bool) -> Any:
    from headrace.compress import folder, run

    if out.suffix != ".gguf":
        return folder.compress_folder(path, out, pipeline, status())
    return run.compress(path, out, pipeline, status(), overwrite)


def _rows(report: Any) -> list[tuple[str, ...]]:
    return [
        (name, one.kind, str(one.nbytes), "" if one.error is None else f"{one.error:.3e}")
        for name, one in report.matrices.items()
    ]


def _fields(report: Any, out: Path | None, model: Path) -> list[tuple[str, str]]:
    before = model.stat().st_size if model.is_file() else sum(one.stat().st_size for one in model.glob("*.safetensors"))
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items())
    fields = [
        ("written" if out else "would be", f"{human_size(report.bytes)}, {report.bytes / before:.0%} of {human_size(before)}"),
        ("weights", f"{report.weights:,} in {report.bits:.2f} bits each"),
        ("tensors", f"{len(report.matrices)}: {kinds}"),
        ("memory", f"{human_size(report.largest)} for the largest matrix, besides the model's mapped file"),
    ]
    if out is not None:
        fields += [("error", f"{report.error:.3%} of the squares of what was rounded or left out")]
        fields += [("zeros", f"{report.zeros:.2%} of the weights of layers")] if report.zeros is not None else []
        fields += [("file", str(out))]
    return fields


def _record(report: Any) -> dict[str, Any]:
    return {
        "bytes": report.bytes,
        "weights": report.weights,
        "bits": report.bits,
        "kinds": report.kinds,
        "warnings": report.warnings,
        "error": report.error,
        "zeros": report.zeros,
        "seconds": round(report.seconds, 3),
        "matrices": {
            name: {"kind": one.kind, "bytes": one.nbytes, "error": one.error, "zeros": one.zeros}
            for name, one in report.matrices.items()
        },
    }
