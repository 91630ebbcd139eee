"""Command train-classifier: train exits of an encoder on labelled texts."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.inputs import layers_of
from headrace.cli.interrupt import Interrupt, resumable
from headrace.cli.options import ModelName, writable_folder
from headrace.cli.output import print_table, say, status
from headrace.data.progress import threshold_text

ExitPooling = Annotated[
    str | None, typer.Option(help="Pooling of an exit: first, mean or both (default: as the encoder was trained).")
]
EachExit = Annotated[
    bool, typer.Option("--each-exit", help="Entropy: a threshold for each exit, as in BranchyNet, shaped on --data.")
]

Tolerance = Annotated[
    float | None,
    typer.Option(
        help="Labels are numbers: exits predict a number, and patience counts exits that change it by less than this."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train-classifier")(train_classifier)


def train_classifier(
    model: ModelName,
    data: Annotated[
        Path,
        typer.Option("--data", "-d", exists=True, dir_okay=False, help='JSON lines (or .tsv, .csv): "text" and "label".'),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", file_okay=False, help="Output folder.", callback=writable_folder)],
    check: Annotated[
        Path | None,
        typer.Option("--check", exists=True, dir_okay=False, help="Calibration texts (default: 3 in 10 of --data)."),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers with an exit, such as 2,4,6 (default: each).")] = None,
    pooling: ExitPooling = None,
    delta: Annotated[
        float, typer.Option(help="Share of texts that early exit may classify wrongly and the full model correctly.")
    ] = 0.01,
    epsilon: Annotated[float, typer.Option(help="Probability that the bound does not hold.")] = 0.05,
    decay: Annotated[float, typer.Option(min=0.0, help="Weight decay.")] = 1e-3,
    each_exit: EachExit = False,
    tolerance: Tolerance = None,
    most: Annotated[int | None, typer.Option(min=4, help="Number of texts to use (default: all).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    joint: Annotated[
        bool, typer.Option("--joint", help="Train the encoder together with its exits; OUT is a new model with its classifier.")
    ] = False,
    epochs: Annotated[int, typer.Option(min=1, help="With --joint: epochs.")] = 1,
    rate: Annotated[float, typer.Option(min=1e-7, max=0.1, help="With --joint: highest learning rate of the encoder.")] = 5e-5,
    batch: Annotated[int, typer.Option(min=1, help="With --joint: texts per step.")] = 32,
) -> None:
    """Train a classifier with an exit after each layer of an encoder (BERT, MiniLM), whose weights stay fixed.

    With --joint the encoder is trained together with its exits, and OUT is a new model folder; a stopped run continues when the
    command is repeated.

    Thresholds are calibrated on texts that were not used for training: with probability 1 - epsilon at most a share delta of
    texts is lost.
    """
    from headrace.cli.opening import fetch
    from headrace.training.classifier import ClassifierConfig, read_labelled, train
    from headrace.training.joint_classifier import JointConfig

    exits = layers_of(layers, "--layers") or None
    if pooling not in (None, "first", "mean", "both"):
        raise typer.BadParameter(f"--pooling takes first, mean or both, not {pooling!r}")
    read = partial(read_labelled, numbers=tolerance is not None)
    texts, path = read(data, most), fetch(model)
    together = JointConfig(epochs, batch, rate, seed) if joint else None
    common: dict[str, Any] = {"each_exit": each_exit, "tolerance": tolerance, "seed": seed, "threads": threads}
    config = ClassifierConfig(exits, pooling, decay, delta, epsilon, joint=together, **common)
    others = None if check is None else read(check)
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
    measure = "right" if result.exits.tolerance is None else "correlation"
    print_table(("after layer", measure), [(str(layer), f"{share:.3f}") for layer, share in exits])
    rows = [(one.criterion, threshold_text(one.threshold), f"{one.mean_layers:.2f}", f"{one.risk:.4f}") for one in result.rules]
    if rows:
        print_table(("criterion", "threshold", "layers a text", "lost"), rows)
    say(
        f"thresholds lose at most {delta:g} with probability {1 - epsilon:g}"
        if rows
        else f"no threshold is guaranteed to lose at most {delta:g} on so few texts: none is set"
    )
