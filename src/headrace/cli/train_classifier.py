"""Command train-classifier: train exits of an encoder on labelled texts."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.files import writable_folder
from headrace.cli.inputs import layers_of
from headrace.cli.interrupt import Interrupt, resumable
from headrace.cli.options import ModelName
from headrace.cli.output import print_table, say
from headrace.cli.status import status


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train-classifier")(train_classifier)


def train_classifier(
    model: ModelName,
    data: Annotated[
        Path,
        typer.Option("--data", "-d", exists=True, dir_okay=False, help='JSON lines (or .tsv, .csv): "text" and "label".'),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", file_okay=False, help="Folder for the classifier.", callback=writable_folder)
    ],
    check: Annotated[
        Path | None,
        typer.Option("--check", exists=True, dir_okay=False, help="Texts to calibrate with (default: 3 in 10 of --data)."),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Exits after these layers, as in 2,4,6 (default: after each).")] = None,
    pooling: Annotated[
        str | None, typer.Option(help="What an exit reads: first, mean or both (default: as the encoder was trained).")
    ] = None,
    delta: Annotated[float, typer.Option(help="The share of texts that may be lost against the whole model.")] = 0.01,
    epsilon: Annotated[float, typer.Option(help="How often that may not hold.")] = 0.05,
    decay: Annotated[float, typer.Option(min=0.0, help="How much large weights cost.")] = 1e-3,
    most: Annotated[int | None, typer.Option(min=4, help="Only so many texts.")] = None,
    seed: Annotated[int, typer.Option(help="Of the texts that are held out.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    joint: Annotated[
        bool, typer.Option("--joint", help="The encoder learns with its exits; OUT is a new model with its classifier.")
    ] = False,
    epochs: Annotated[int, typer.Option(min=1, help="Of --joint: how often each text is learnt from.")] = 1,
    rate: Annotated[float, typer.Option(min=1e-7, max=0.1, help="Of --joint: the encoder's highest rate of learning.")] = 5e-5,
    batch: Annotated[int, typer.Option(min=1, help="Of --joint: texts of a step.")] = 32,
) -> None:
    """Train a classifier with an exit after each layer of an encoder (BERT, MiniLM), whose own weights stay as they are.

    With --joint they do not: encoder and exits learn together, and OUT is a folder as any model's; stopped, the same command
    goes on.

    Thresholds are calibrated on texts that trained nothing: with probability 1 - epsilon no more than delta of texts is lost.
    """
    from headrace.cli.opening import fetch
    from headrace.training.classifier import ClassifierConfig, read_labelled, train
    from headrace.training.joint_classifier import JointConfig

    exits = layers_of(layers, "--layers") or None
    if pooling not in (None, "first", "mean", "both"):
        raise typer.BadParameter(f"--pooling takes first, mean or both, not {pooling!r}")
    texts, path = read_labelled(data, most), fetch(model)
    together = JointConfig(epochs, batch, rate, seed) if joint else None
    config = ClassifierConfig(exits, pooling, decay, delta, epsilon, joint=together, seed=seed, threads=threads)
    others = None if check is None else read_labelled(check)
    with resumable(out) if joint else nullcontext():
        result = train(str(path), texts, out, config, status(), others, Interrupt())
    status().finish()
    for note in result.notes:
        say(note)
    _print(result, delta, epsilon)
    what = "model and classifier are" if joint else "the classifier is"
    say(f"{what} in {out}; use it with: headrace classify {out if joint else model} -c {out}")


def _print(result: Any, delta: float, epsilon: float) -> None:
    exits = zip(result.exits.layers, result.accuracy, strict=True)
    print_table(("after layer", "right"), [(str(layer), f"{share:.3f}") for layer, share in exits])
    rows = [(one.criterion, f"{one.threshold:.4g}", f"{one.mean_layers:.2f}", f"{one.risk:.4f}") for one in result.rules]
    if rows:
        print_table(("criterion", "threshold", "layers a text", "lost"), rows)
    say(
        f"thresholds lose at most {delta:g} with probability {1 - epsilon:g}"
        if rows
        else f"no threshold loses at most {delta:g} for sure on so few texts: none is set"
    )
