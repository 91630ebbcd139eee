"""bench exits: what leaving early saves and loses, of a classifier and of a decoder."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.files import writable
from headrace.cli.help import short_help
from headrace.cli.options import ModelName, WeightOptions
from headrace.cli.output import print_table
from headrace.cli.status import status

MOST_LABELS = 10  # whose confusions are printed
PRINTED = (0.1, 0.25, 0.5)  # shares of tokens that leave


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "classifier data exits source criterion threshold rounds json_file",
        ("headrace bench exits MODEL -c FOLDER -d dev.jsonl", "What a classifier's texts save and lose by leaving early."),
        ("headrace bench exits MODEL --exits FOLDER -i prompts.txt", "What a decoder's tokens do."),
    )
    bench.command("exits", cls=short)(exits)


def exits(
    model: ModelName,
    classifier: Annotated[
        Path | None, typer.Option("--classifier", "-c", exists=True, file_okay=False, help="Of an encoder: a classifier.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", "-d", exists=True, dir_okay=False, help='JSON lines (or .tsv, .csv): "text" and "label".'),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--exits", exists=True, file_okay=False, help="Of a decoder: exits (train-heads --kind exit)."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--input", "-i", exists=True, dir_okay=False, help="Prompts that trained nothing, one a line."),
    ] = None,
    criterion: Annotated[
        str | None, typer.Option(help="By which texts or tokens leave where time is measured (default: as calibrated).")
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="Of the criterion (default: as calibrated).")] = None,
    decay: Annotated[
        float, typer.Option(min=0.0, max=100.0, help="Of tokens: the curves' threshold that falls along the answer.")
    ] = 4.0,
    most: Annotated[int | None, typer.Option(min=2, help="Only so many texts.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=2, help="Tokens of an answer at most.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds of each batch size.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    backend: Annotated[str, typer.Option(help="auto, native or torch.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw what is right over layers into this SVG file.", callback=writable)
    ] = None,
) -> None:
    """Accuracy, layers and time of what leaves early beside the whole model: texts of a classifier, or tokens of a decoder.

    Of a decoder every exit says at every token of the model's greedy answers what it would write, and so does the whole model.
    """
    from headrace.bench.plots import about, draw

    options, rule = WeightOptions(threads=threads, backend=backend), (criterion, threshold)
    if classifier is not None and data is not None and folder is None and source is None:
        found, lines = _of_texts(model, options, classifier, data, most, rule, rounds)
        axes = "layers a text", "right, percent"
    elif folder is not None and source is not None and classifier is None and data is None:
        found, lines = _of_tokens(model, options, folder, source, most, rule, (decay, max_tokens, rounds))
        axes = "layers a token", "of those that leave as the whole model, percent"
    else:
        raise typer.BadParameter("give --classifier and --data, of an encoder, or --exits and --input, of a decoder")
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    if plot is not None:
        plot.write_text(draw("Exits", *axes, lines, about(Path(model).name)), "utf-8")


def _of_texts(
    model: str,
    options: WeightOptions,
    classifier: Path,
    data: Path,
    most: int | None,
    rule: tuple[str | None, float | None],
    rounds: int,
) -> tuple[dict[str, Any], list[Any]]:
    """A classifier's figures, printed, and its curves."""
    from headrace.bench import exits as bench
    from headrace.cli.opening import open_llm
    from headrace.training.classifier import read_labelled

    texts = read_labelled(data, most)
    llm: Any = open_llm(model, options, classifier=classifier)
    status().start("measuring")
    found = bench.measure(llm, texts, *rule, rounds)
    llm.close()
    rows = [(f"{one['batch']}", f"{one['speedup']:.2f}", f"{one['least']:.2f}..{one['most']:.2f}") for one in found["batches"]]
    print_table(("batch", "times as fast", "rounds"), rows)
    each = zip(found["exit_layers"], found["by_exit"], found["calibration_error"], strict=True)
    print_table(("after layer", "right", "off its own word"), [(str(one), f"{a:.3f}", f"{b:.3f}") for one, a, b in each])
    if len(found["labels"]) <= MOST_LABELS:
        counts = [(label, *map(str, row)) for label, row in zip(found["labels"], found["confusion"], strict=True)]
        print_table(("is, and said to be", *found["labels"]), counts)
    for line in _lines_of_texts(found):
        print(line)
    return found, bench.lines(found)


def _lines_of_texts(found: dict[str, Any]) -> list[str]:
    lost = 100 * (found["full_accuracy"] - found["accuracy"])
    thought = found["overthinking"]
    return [
        f"{found['criterion']} {found['threshold']:.4g}: {found['accuracy']:.3f} right of {found['n']} "
        f"(whole model {found['full_accuracy']:.3f}, {lost:+.1f} points lost), "
        f"{found['mean_layers']:.2f} layers a text, {found['layers']:.2f} times fewer",
        f"overthinking: {thought['wasteful']:.1%} were right before the last exit already, {thought['destructive']:.1%} were, "
        f"and end wrong ({thought['of_errors']:.0%} of what is wrong in the end); leaving where it is right would give "
        f"{thought['best']:.3f}",
    ]


def _of_tokens(
    model: str,
    options: WeightOptions,
    folder: Path,
    source: Path,
    most: int | None,
    rule: tuple[str | None, float | None],
    sizes: tuple[float, int, int],
) -> tuple[dict[str, Any], list[Any]]:
    """A decoder's figures, printed, and its curves."""
    from headrace.bench import leaving as bench
    from headrace.cli.opening import open_llm
    from headrace.startup.heads import load
    from headrace.workflows.prompts import read_prompts

    decay, max_tokens, rounds = sizes
    chosen, prompts = bench.rule_of(folder, *rule), read_prompts(source, most)
    llm: Any = open_llm(model, options, exits=str(folder), speculate=None)
    status().start("measuring")
    heads = load(folder, llm.opened)
    found = bench.measure(llm, heads, prompts, chosen, max_tokens=max_tokens, decay=decay, rounds=rounds)
    llm.close()
    print_table(("after layer", "agrees", "cost by bytes", "calibration error", "its classifier's"), _rows_of_exits(found))
    columns = ("criterion", "threshold", "leave", "agree", "layers", "bytes", "falling: leave", "agree")
    print_table(columns, _rows_of_curves(found))
    rows = [
        (
            *(f"{one['batch']}", f"{one['share']:.1%}", f"{one['speedup']:.2f}"),
            *(f"{one['least']:.2f}..{one['most']:.2f}", f"{one['bytes']:.2f}"),
        )
        for one in found["batches"]
    ]
    print_table(("batch", "leave", "times as fast", "rounds", "by bytes"), rows)
    changed = [
        (f"{one['place']:.0%}", f"{one['lost']:.3f}", f"{one['after']:.3f}", f"{one['n']}") for one in found["perturbed"]
    ]
    print_table(("another token after", "of the answer is lost", "of what follows", "answers"), changed)
    for line in _lines_of_tokens(found):
        print(line)
    return found, bench.lines(found)


def _rows_of_exits(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for one in found["exits"]:
        errors = [f"{value:.3f}" for value in one["calibration_error"].values()]
        rows.append((f"{one['layers']}", f"{one['agreement']:.1%}", f"{one['cost']:.2f}", *[*errors, "", ""][:2]))
    return rows


def _rows_of_curves(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Of the exit by which tokens leave, each criterion at the thresholds by which about so many do."""
    (exit,) = [one for one in found["exits"] if one["layers"] == found["leave_after"]]
    rows: list[tuple[str, ...]] = []
    for criterion, curves in exit["curves"].items():
        for share in PRINTED:
            pairs = zip(curves["steady"], curves["falling"], strict=True)
            steady, falling = min(pairs, key=lambda pair: abs(pair[0]["share"] - share))
            left = f"{steady['threshold']:.4g}", f"{steady['share']:.1%}", _percent(steady["agreement"])
            costs = f"{steady['layers']:.1f}", f"{steady['bytes']:.2f}"
            rows.append((criterion, *left, *costs, f"{falling['share']:.1%}", _percent(falling["agreement"])))
    return rows


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _lines_of_tokens(found: dict[str, Any]) -> list[str]:
    rule, oracle, thought, checks = (found[name] for name in ("rule", "oracle", "overthinking", "checks"))
    falls = f", decay {rule['decay']:g}" if rule["decay"] else ""
    return [
        f"of {found['tokens']} tokens of {found['texts']} answers; curves are of the exit after {found['leave_after']} layers, "
        f"timed by {rule['criterion']} {rule['threshold']:.4g}{falls}",
        f"who knew the first exit that agrees would compute {oracle['needed']:.1f} layers a token; "
        f"{oracle['wasteful']:.1%} of tokens have one",
        f"overthinking, of {thought['tokens']} tokens of the prompts: {thought['wasteful']:.1%} are right at an exit already, "
        f"{thought['destructive']:.1%} are, and the whole model is wrong",
        f"to look after every layer whether a token may leave reads {checks['every_layer']:.2f} times a plain step's weights "
        f"with the model's head, {checks['every_layer_short']:.2f} with the exits' tokens alone; one exit "
        f"{checks['one_exit']:.2f}",
    ]
