"""bench exits: what leaving early saves and loses."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.classify import ClassifierFolder
from headrace.cli.files import writable
from headrace.cli.help import short_help
from headrace.cli.options import ModelName, WeightOptions
from headrace.cli.output import print_table
from headrace.cli.status import status

MOST_LABELS = 10  # whose confusions are printed


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "classifier data criterion threshold rounds json_file",
        ("headrace bench exits MODEL -c FOLDER -d dev.jsonl", "What leaving early saves and loses."),
    )
    bench.command("exits", cls=short)(exits)


def exits(
    model: ModelName,
    classifier: ClassifierFolder,
    data: Annotated[
        Path,
        typer.Option("--data", "-d", exists=True, dir_okay=False, help='JSON lines (or .tsv, .csv): "text" and "label".'),
    ],
    criterion: Annotated[
        str | None, typer.Option(help="max_prob, margin, entropy, kl or patience (default: as calibrated).")
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="Of the criterion (default: as calibrated).")] = None,
    most: Annotated[int | None, typer.Option(min=2, help="Only so many texts.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds of each batch size.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    backend: Annotated[str, typer.Option(help="auto, native or torch.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw accuracy over layers into this SVG file.", callback=writable)] = None,
) -> None:
    """Accuracy, layers and time of a classifier that leaves early beside the whole model, on labelled texts."""
    from headrace.bench import exits as bench
    from headrace.bench.plots import about, draw
    from headrace.cli.opening import open_llm
    from headrace.training.classifier import read_labelled

    texts = read_labelled(data, most)
    llm: Any = open_llm(model, WeightOptions(threads=threads, backend=backend), classifier=classifier)
    status().start("measuring")
    found = bench.measure(llm, texts, criterion, threshold, rounds)
    llm.close()
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    if plot is not None:
        drawn = draw("Exits", "layers a text", "right, percent", bench.lines(found), about(Path(model).name))
        plot.write_text(drawn, "utf-8")
    rows = [(f"{one['batch']}", f"{one['speedup']:.2f}", f"{one['least']:.2f}..{one['most']:.2f}") for one in found["batches"]]
    print_table(("batch", "times as fast", "rounds"), rows)
    each = zip(found["exit_layers"], found["by_exit"], found["calibration_error"], strict=True)
    print_table(("after layer", "right", "off its own word"), [(str(one), f"{a:.3f}", f"{b:.3f}") for one, a, b in each])
    if len(found["labels"]) <= MOST_LABELS:
        said = [(label, *map(str, row)) for label, row in zip(found["labels"], found["confusion"], strict=True)]
        print_table(("is, and said to be", *found["labels"]), said)
    for line in _lines(found):
        print(line)


def _lines(found: dict[str, Any]) -> list[str]:
    lost = 100 * (found["full_accuracy"] - found["accuracy"])
    thought = found["overthinking"]
    return [
        f"{found['criterion']} {found['threshold']:.4g}: {found['accuracy']:.3f} right of {found['n']} "
        f"(whole model {found['full_accuracy']:.3f}, {lost:+.1f} points lost), "
        f"{found['mean_layers']:.2f} layers a text, {found['layers']:.2f} times fewer",
        f"overthinking: {thought['wasteful']:.1%} were right before the last exit already, {thought['destructive']:.1%} were, "
        f"and end wrong; leaving where it is right would give {thought['best']:.3f}",
    ]
