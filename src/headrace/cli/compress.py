"""compress: write a model in fewer bytes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import short_help
from headrace.cli.interrupt import Interrupt
from headrace.cli.options import ModelName, with_groups, writable, writable_output
from headrace.cli.output import print_fields, print_table, say, status
from headrace.data.config import parse_bytes
from headrace.data.progress import human_size

PANEL = "Methods"


def _method(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel=PANEL)


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "out number_format method calibrate judge imatrix dry_run",
        ("headrace compress MODEL -o OUT.gguf -f Q4_K_M", "Each weight to its nearest value."),
        (
            "headrace compress MODEL -o OUT.gguf -f Q4_0 --method awq,gptq",
            "The same size with a smaller loss, calibrated on texts of the model.",
        ),
        ("headrace compress MODEL -o FOLDER -f int4-g128-sym --method gptq", "A folder that other engines read, too."),
        (
            "headrace compress MODEL -o OUT.gguf -f Q4_0 --method neurons,heal,gptq --keep-neurons 0.75 --heal-steps 200 "
            "--calibrate train.txt",
            "Prune, train, then quantise.",
        ),
        (
            "headrace compress MODEL -o OUT.gguf --method gptq --calibrate train.txt --judge valid.txt",
            "Calibrate on your own texts.",
        ),
    )
    app.command(cls=short)(with_groups(compress))


@dataclass
class MethodOptions:
    """Fields of Pipeline for methods that read texts."""

    method: Annotated[
        str,
        _method(
            "Methods with commas, in this order. neurons, heads, layers, kv-heads: remove parts of the model; "
            "heal: train the rest on the original's outputs (--heal-steps); awq, smoothquant: scale inputs; "
            "magnitude, wanda, sparsegpt: set weights to zero (--sparsity), sparsegpt also corrects the others; "
            "rtn: round to nearest; weighted: round with input-weighted scales (rtn with --calibrate); "
            "gptq: correct each column's error in the next ones. "
            "Example: neurons,heal,awq,wanda,gptq. All but rtn and magnitude need texts; "
            "wanda can read --imatrix instead."
        ),
    ] = "rtn"
    sparsity: Annotated[
        str | None,
        _method(
            "Weights set to zero: 2:4 (two of four neighbours), 0.5 (half of each row), layer:0.5 (of each matrix), "
            "global:0.5 (of all matrices, with magnitude)."
        ),
    ] = None
    keep_neurons: Annotated[
        float | None, _method("neurons: share of each MLP that is kept, in multiples of 64, such as 0.75.")
    ] = None
    keep_heads: Annotated[float | None, _method("heads: share of K/V heads that is kept, with their query heads.")] = None
    drop_layers: Annotated[
        int | None, _method("layers: number of layers to remove; those that change their input least go first.")
    ] = None
    kv_heads: Annotated[int | None, _method("kv-heads: number of K/V heads after merging neighbours (GQA, MQA).")] = None
    pool: Annotated[
        str | None, _method("kv-heads: merging by aligned (rotated, then averaged), mean, or first of each group.")
    ] = None
    heal_steps: Annotated[int | None, _method("heal: training steps, four texts of --calibrate each.")] = None
    heal_rate: Annotated[float | None, _method("heal: highest learning rate (default: 1e-4).")] = None
    prune_rounds: Annotated[
        int | None,
        _method("heal,magnitude: rounds of pruning in the first half of the training, up to --sparsity; 1: all before it."),
    ] = None
    layout: Annotated[
        str | None,
        _method("Layout of a folder: compressed (compressed-tensors, the default), gptq, awq, or 2:4 (needs groups of 32)."),
    ] = None
    budget: Annotated[
        str | None, _method("Size of all tensors, such as 100MB; chooses the format of each matrix by its importance.")
    ] = None
    calibrate: Annotated[
        str | None,
        _method(
            "Calibration texts: a file, or self (the model writes them; the default of methods that read texts). "
            "With rtn, scales are then searched with the importance of inputs."
        ),
    ] = None
    tokens: Annotated[str, _method("Calibration tokens (auto: four per input of the widest matrix).")] = "auto"
    act_order: Annotated[bool, _method("gptq: quantise the most important columns first.")] = True
    damp: Annotated[
        float | None,
        _method("gptq, sparsegpt: share of the Hessian's mean diagonal that is added to it (default: 0.01)."),
    ] = None
    true_sequential: Annotated[
        bool,
        typer.Option(
            "--true-sequential",
            help="gptq, sparsegpt: measure each matrix with the matrices before it in the layer already rounded.",
            rich_help_panel=PANEL,
        ),
    ] = False
    alpha: Annotated[
        str | None, _method("smoothquant: share of the range moved to the weights, 0 to 1 (default: 0.8), or auto (by layer).")
    ] = None
    judge: Annotated[
        str,
        _method("Compare with the original on a text: a file, self, or none. Encoders: the embeddings of a file's lines."),
    ] = "none"
    write_imatrix: Annotated[
        Path | None,
        typer.Option(help="Write the measured importance to a .gguf file.", callback=writable, rich_help_panel=PANEL),
    ] = None
    kv: Annotated[
        str | None,
        _method("Store in OUT that K and V are kept as int8 or int4, centred by the mean key of the calibration texts."),
    ] = None
    seed: Annotated[int, _method("Seed for choosing texts.")] = 0
    keep_work: Annotated[
        bool, typer.Option("--keep-work", help="Keep OUT.work, the state of a stopped run.", rich_help_panel=PANEL)
    ] = False

    def values(self) -> dict[str, Any]:
        """Arguments of Pipeline. Raises typer.BadParameter and ValueError."""
        if self.tokens != "auto" and not (self.tokens.isdecimal() and int(self.tokens) > 0):
            raise typer.BadParameter(f"--tokens is a number or auto, not {self.tokens}")
        return {
            **asdict(self),
            "method": tuple(name.strip() for name in self.method.lower().split(",")),
            "budget": None if self.budget is None else parse_bytes(self.budget),
            "tokens": None if self.tokens == "auto" else int(self.tokens),
            "judge": None if self.judge == "none" else self.judge,
        }


def compress(
    model: ModelName,
    methods: MethodOptions,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The .gguf file or folder to write.", callback=writable_output)
    ] = None,
    number_format: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            help="GGUF: F16, BF16, Q8_0, Q6_K, Q5_K_M, Q5_K_S, Q4_K_M, Q4_K_S, IQ4_NL, Q4_1, Q4_0, Q3_K_L, Q3_K_M, "
            "Q3_K_S, Q2_K …, named as in llama.cpp, and MXFP4. Folder: int4-g128, int4-g64-sym, int8, w8a8 … "
            "(bits, group size, symmetric or with zero points); mxfp4, nvfp4 (4-bit floats).",
        ),
    ] = "Q4_K_M",
    head: Annotated[str | None, typer.Option(help="Format of the output projection, such as Q8_0; for a folder int8.")] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Importance of each input: a file of llama-imatrix, GGUF or .dat."),
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads (0: one per core).")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print sizes and memory, and write nothing.")] = False,
    matrices: Annotated[bool, typer.Option("--matrices", help="List every tensor: format, bytes, error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a model with fewer bits per weight, or with fewer weights, as a GGUF file or a folder.

    MODEL is a .gguf file, or a folder with safetensors of a Llama, Mistral, Qwen2, Qwen3, GPT-2 or an encoder (BERT). Weights
    are rounded to nearest, or quantised so that the outputs of each layer change least (--method). One matrix is in memory at
    a time, or one layer for methods that read texts. A stopped command continues when it is repeated. The result differs from
    MODEL: --judge, or `headrace perplexity` on both, measures the loss.
    """
    if out is None and not dry_run:
        raise typer.BadParameter("give a file to write with -o OUT.gguf, or --dry-run")
    if out is not None and not dry_run:
        _check_new(out, overwrite)

    from headrace.cli.opening import fetch
    from headrace.compress.mixes import check_folder_format, mix_named
    from headrace.compress.pipeline import Pipeline

    pipeline = Pipeline(format=number_format, head=head, imatrix=imatrix, threads=threads, **methods.values())
    pipeline.check()
    if out is not None:
        (mix_named if out.suffix == ".gguf" else check_folder_format)(pipeline.format)
    path = fetch(model)
    report = _predicted(path, out, pipeline) if dry_run or out is None else _written(path, out, pipeline, overwrite)
    status().finish()
    if as_json:
        print(json.dumps(report.record(), indent=2))
        return
    print_fields(_fields(report, None if dry_run else out, path))
    if matrices:
        print_table(("TENSOR", "KIND", "BYTES", "ERROR"), _rows(report))


def _check_new(out: Path, overwrite: bool) -> None:
    """Raise ValueError if OUT exists, unless a stopped command may have written it or --overwrite replaces it."""
    if not out.exists() or out.with_name(f"{out.name}.work").is_dir():
        return
    if out.is_dir() or out.suffix != ".gguf":
        raise ValueError(f"{out} exists; give another name")
    if not overwrite:
        raise ValueError(f"{out} exists; give another name, or --overwrite")


def _predicted(path: Path, out: Path | None, pipeline: Any) -> Any:
    from headrace.compress.layouts import is_of_folders
    from headrace.compress.write import FolderPlan, GGUFPlan, container_of, predict

    by_format = FolderPlan if is_of_folders(pipeline.format) else GGUFPlan
    report = predict(path, pipeline, container_of(out) if out is not None else by_format)
    for line in report.warnings:
        say(line)
    return report


def _written(path: Path, out: Path, pipeline: Any, overwrite: bool) -> Any:
    from headrace.compress.write import compress

    try:
        return compress(path, out, pipeline, status(), overwrite, _healer(pipeline))
    except KeyboardInterrupt:
        if pipeline.reads:
            say(f"{out}: stopped; the same command continues")
        raise


def _healer(pipeline: Any) -> Any:
    """The trainer, if the pipeline heals."""
    if pipeline.heal is None:
        return None
    from headrace.training.distil import Healing

    return Healing(Interrupt())


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
        ("memory", f"{human_size(report.largest)} at most, without the mapped model file and the program itself"),
    ]
    if report.kv.before:
        fields.append(("K and V", _kv(report.kv)))
    if out is not None:
        fields.append(("error", f"{report.error:.3%} of the squared weights that were rounded or removed"))
        if report.zeros is not None:
            fields.append(("zeros", f"{report.zeros:.2%} of the weights of layers"))
        fields += [(cut.method, _cut(cut)) for cut in report.cuts]
        if report.healed is not None:
            fields.append(("heal", _healed(report.healed)))
        if report.outputs:
            fields.append(("outputs", _outputs(list(report.outputs.values()))))
        if report.judged is not None:
            fields.append(("judged", _judged(report.judged)))
        fields.append(("file" if out.suffix == ".gguf" else "folder", str(out)))
    return fields


def _judged(judged: Any) -> str:
    """Loss on the texts to judge by: of next tokens, or of an encoder's embeddings."""
    if hasattr(judged, "kl"):
        return f"KL {judged.kl:.4f} nats, perplexity {judged.perplexity:.3f} of {judged.perplexity_before:.3f}"
    nearest = f"nearest text the same for {judged.same_nearest:.1%} of {judged.texts}"
    return f"cosine with the original's embeddings {judged.cosine:.4f} on average, {judged.least:.4f} at least; {nearest}"


def _kv(kv: Any) -> str:
    """Bytes of a token's K and V, compared with before if they differ."""
    size = f"{kv.bytes:,} bytes a token in {kv.format}"
    return size if kv.bytes == kv.before else f"{size}, {kv.bytes / kv.before:.0%} of {kv.before:,} in bfloat16"


def _cut(cut: Any) -> str:
    """Size after a cut, and dropped layers or output errors."""
    size = f"{cut.after:,} of {cut.before:,}"
    if cut.dropped:
        return f"{size}, without {', '.join(map(str, cut.dropped))} (counted from 0)"
    error, repaired, held = cut.mean("error"), cut.mean("repaired"), cut.mean("held_repaired")
    elsewhere = "" if held is None else f", {held:.1%} on texts held out"
    return f"{size}, {error:.1%} of the squares of outputs lost, {repaired:.1%} after repair{elsewhere}"


def _healed(healed: Any) -> str:
    """Gain and length of a training."""
    before, after = healed.before, healed.after
    gain = f"KL {before.kl:.4f} to {after.kl:.4f} nats, perplexity {before.perplexity:.3f} to {after.perplexity:.3f}"
    seen = f"{healed.tokens:,} tokens seen in {healed.steps:,} steps, {healed.different:,} of them different"
    return f"{gain} (of {after.perplexity_before:.3f}) on texts held out; {seen}"


def _outputs(reports: Any) -> str:
    """Output error over all matrices, compared with rounding to nearest on the same scales."""
    weights = sum(one.weights for one in reports)
    mean_error, nearest = (sum(getattr(one, name) * one.weights for one in reports) / weights for name in ("error", "nearest"))
    return f"{mean_error:.3%} of the squares of the layers' outputs, {nearest:.3%} by --method rtn with the same --calibrate"
