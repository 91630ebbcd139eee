"""Command classify: the class of each text, one JSON line each."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import short_help
from headrace.cli.inputs import texts_of
from headrace.cli.opening import open_llm
from headrace.cli.options import ModelName, WeightOptions, with_groups
from headrace.cli.output import json_text, status
from headrace.data.progress import Progress

# Texts of one engine call.
BATCH = 64

ClassifierFolder = Annotated[
    Path, typer.Option("--classifier", "-c", exists=True, file_okay=False, help="Folder that train-classifier wrote.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "classifier file criterion threshold threads",
        ('headrace classify MODEL -c FOLDER "a fine film"', "The class, as a JSON line."),
        ("headrace classify MODEL -c FOLDER --criterion off", "All layers, for each line of stdin."),
    )
    app.command(cls=short)(with_groups(classify))


def classify(
    model: ModelName,
    options: WeightOptions,
    classifier: ClassifierFolder,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXTS]...", help="Texts (default: the lines of --file or stdin).")
    ] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="File with one text per line.")] = None,
    criterion: Annotated[
        str | None,
        typer.Option(
            help="Criterion of early exit: max_prob, margin, entropy, kl, patience; off: no early exit (default: as "
            "calibrated)."
        ),
    ] = None,
    threshold: Annotated[
        str | None,
        typer.Option(
            metavar="FLOAT[,FLOAT…]",
            help="Threshold of the criterion, or one for each exit but the last, as 0.1,0.3 (default: as calibrated).",
        ),
    ] = None,
    show_exits: Annotated[
        bool, typer.Option("--show-exits", help="Print the class and confidence at each computed exit.")
    ] = False,
    pairs: Annotated[bool, typer.Option("--pairs", help="Each line holds two texts, separated by a tab.")] = False,
) -> None:
    """Classify texts: one JSON line each, {"text", "tokens", "label", "probabilities", "layers"}.

    A text exits at the first layer whose confidence passes the threshold; the layers above are skipped for it. Numbers have
    seven significant digits, the precision of the logits.
    """
    options.check()
    given = texts_of(texts, file)
    if pairs and (wrong := next((text for text in given if len(text.split("\t")) != 2), None)) is not None:
        raise typer.BadParameter(f"--pairs: a line must be two texts with one tab between them, not {wrong[:60]!r}")
    limits = thresholds_of(threshold)
    llm = open_llm(model, options, classifier=classifier)
    status().finish()
    # On a terminal, the output lines themselves show the progress.
    progress = Progress() if sys.stdout.isatty() else status()
    progress.start("classifying", len(given), unit="texts")
    for start in range(0, len(given), BATCH):
        part = given[start : start + BATCH]
        asked = [tuple(text.split("\t")) for text in part] if pairs else part
        for text, output in zip(part, llm.classify(asked, criterion=criterion, threshold=limits), strict=True):
            line = {"text": text, "tokens": len(output.token_ids), **output.record(votes=show_exits)}
            print(json_text(_rounded(line)), flush=True)
        progress.advance(len(part))
    progress.finish()


def thresholds_of(text: str | None) -> float | tuple[float, ...] | None:
    """One number, or several separated by commas. Raises typer.BadParameter."""
    try:
        numbers = () if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"--threshold: give a number, or several with commas, not {text!r}") from None
    return numbers if len(numbers) > 1 else next(iter(numbers), None)


def _rounded(value: Any) -> Any:
    """JSON data with floats rounded to the seven significant digits of float32 logits."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value
