"""bench exits: accuracy and speed of early exit, for a classifier and for a decoder."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.figures import Measurement, Plot
from headrace.cli.measuring import add_measurement
from headrace.cli.options import ModelName, WeightOptions
from headrace.cli.output import status


def register(bench: typer.Typer) -> None:
    """Add the command."""
    add_measurement(
        bench,
        exits,
        "classifier data exits source criterion threshold rounds json_file",
        ("headrace bench exits MODEL -c FOLDER -d dev.jsonl", "Savings and loss of early exit of a classifier."),
        ("headrace bench exits MODEL --exits FOLDER -i prompts.txt", "The same for the tokens of a decoder."),
        plot="Draw what is right over layers into this SVG file.",
    )


def exits(
    model: ModelName,
    classifier: Annotated[
        Path | None, typer.Option("--classifier", "-c", exists=True, file_okay=False, help="Encoder: folder of a classifier.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", "-d", exists=True, dir_okay=False, help='JSON lines (or .tsv, .csv): "text" and "label".'),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--exits", exists=True, file_okay=False, help="Decoder: folder of exits (train-heads --kind exit)."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--input", "-i", exists=True, dir_okay=False, help="Prompts that were not used for training, one per line."
        ),
    ] = None,
    criterion: Annotated[str | None, typer.Option(help="Exit criterion for the timing (default: as calibrated).")] = None,
    threshold: Annotated[float | None, typer.Option(help="Threshold of the criterion (default: as calibrated).")] = None,
    decay: Annotated[float, typer.Option(min=0.0, max=100.0, help="Decoder: decay of the threshold along the answer.")] = 4.0,
    most: Annotated[int | None, typer.Option(min=2, help="Number of texts to use (default: all).")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=2, help="Most tokens of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds of each batch size.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    backend: Annotated[str, typer.Option(help="auto, native or torch.")] = "auto",
) -> Measurement:
    """Compare early exit with the full model: accuracy, layers and time, for texts of a classifier or tokens of a decoder.

    For a decoder, every exit and the full model predict each token of the model's greedy answers.
    """
    options, rule = WeightOptions(threads=threads, backend=backend), (criterion, threshold)
    if classifier is not None and data is not None and folder is None and source is None:
        from headrace.bench import classifier as classifiers
        from headrace.training.classifier import read_labelled

        texts = read_labelled(data, most, numbers=True)
        with _measuring(model, options, classifier=classifier) as llm:
            result = classifiers.measure(llm, texts, *rule, rounds)
        printed, lines = classifiers.printed(result), classifiers.curve_lines(result)
        axes = "layers a text", "right, percent"
    elif folder is not None and source is not None and classifier is None and data is None:
        from headrace.bench import early_exit
        from headrace.startup.heads import load
        from headrace.workflows.prompts import read_prompts

        chosen, prompts = early_exit.rule_of(folder, *rule), read_prompts(source, most)
        with _measuring(model, options, exits=str(folder), speculate=None) as llm:
            sizes: dict[str, Any] = {"max_tokens": max_tokens, "decay": decay, "rounds": rounds}
            result = early_exit.measure(llm, load(folder, llm.opened), prompts, chosen, **sizes)
        printed, lines = early_exit.printed(result), early_exit.curve_lines(result)
        axes = "layers a token", "early tokens that agree with the full model, percent"
    else:
        raise typer.BadParameter("give --classifier and --data, of an encoder, or --exits and --input, of a decoder")
    return Measurement(result, printed, Plot("Exits", *axes, lines, Path(model).name))


@contextmanager
def _measuring(model: str, options: WeightOptions, **settings: Any) -> Iterator[Any]:
    """The model while it is measured; closed afterwards."""
    from headrace.cli.opening import open_llm

    with closing(open_llm(model, options, **settings)) as llm:
        status().start("measuring")
        yield llm
