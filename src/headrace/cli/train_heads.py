"""train-heads: small networks that draft for a model, learnt from what it writes."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.files import writable_folder
from headrace.cli.help import short_help
from headrace.cli.inputs import layers_of
from headrace.cli.options import ModelName, with_groups
from headrace.cli.output import print_table, say
from headrace.cli.status import status


class Kind(StrEnum):
    """Of heads."""

    HEADS = "heads"
    FEATURE = "feature"
    EXIT = "exit"


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "out kind exits source texts minutes tokens threads",
        ("headrace train-heads smollm2-135m -o heads", "Heads in the folder heads, learnt from what the model writes."),
        ("headrace train-heads MODEL -o heads -i prompts.txt --minutes 120", "From its answers to prompts of one's own."),
        ("headrace train-heads MODEL -o exits --kind exit --exits 10,20,25", "Exits after 10, 20 and 25 of its layers."),
        ("headrace chat MODEL --draft heads", "Use them."),
    )
    app.command("train-heads", cls=short)(with_groups(train_heads))


def train_heads(
    model: ModelName,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", file_okay=False, help="Folder for the heads, and to go on from.", callback=writable_folder),
    ],
    kind: Annotated[
        Kind,
        typer.Option(
            help="heads: one for each token ahead; feature: a layer that drafts token by token; "
            "exit: a head after some of the model's layers, which draft with it."
        ),
    ] = Kind.FEATURE,
    exits: Annotated[
        str | None, typer.Option(help="Exits after these layers, as in 10,20,25 (default: 2, 4 and 5 sixths of them).")
    ] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--input", "-i", exists=True, dir_okay=False, help="Prompts, one a line (default: the model writes some)."
        ),
    ] = None,
    texts: Annotated[int, typer.Option(min=32, help="Answers to learn from.")] = 2048,
    minutes: Annotated[float, typer.Option(min=0.01, help="How long to train, once the texts are there.")] = 45,
    tokens: Annotated[int, typer.Option(min=1, max=8, help="Tokens drafted at once.")] = 3,
    vocab: Annotated[int, typer.Option(min=16, help="Tokens to choose from: the most frequent ones of the texts.")] = 8192,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=8, help="Tokens of an answer at most.")] = 256,
    rate: Annotated[float, typer.Option(min=1e-6, help="The highest rate of learning.")] = 1e-3,
    batch: Annotated[int, typer.Option(min=1, help="Texts of a step.")] = 8,
    seed: Annotated[int, typer.Option(help="Of prompts and answers.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Train heads that draft for a model, from its own answers; then: --draft OUT. The same command goes on where it stopped.

    Answers with the model's hidden rows, and the state of the training, are in OUT/work, which can be removed afterwards.
    """
    from headrace.cli.opening import fetch

    places = _places(exits, kind)
    path = fetch(model)

    from headrace.training.exit_heads import distil_exits
    from headrace.training.heads import Recipe, distil
    from headrace.workflows.prompts import read_prompts

    prompts = [prompt for file in source or [] for prompt in read_prompts(file)]
    recipe = Recipe(str(kind), texts, minutes, tokens, vocab, max_tokens, rate, batch, seed, threads, prompts, places)
    status().finish()  # loading says so itself
    if kind is Kind.EXIT:
        _print_exits(distil_exits(str(path), out, recipe, _progress()))
        say(f"the exits are in {out}; use them with --draft {out}")
        return
    result = distil(str(path), out, recipe, _progress())
    rows = [(str(place + 1), f"{share:.0%}") for place, share in enumerate(result.agreement)]
    print_table(("tokens ahead", "all as the model has it"), rows)
    say(f"held-out prompts: {result.accepted:.0%} of drafted tokens accepted, {result.tokens_per_step:.2f} tokens a step")
    say(f"the heads are in {out}; use them with --draft {out}")


def _places(exits: str | None, kind: Kind) -> tuple[int, ...]:
    if exits is not None and kind is not Kind.EXIT:
        raise typer.BadParameter(f"--exits is for --kind exit, not {kind}; leave one of the two out")
    return layers_of(exits, "--exits")


def _print_exits(result: Any) -> None:
    columns = (
        *("after layer", "row as it is", "exit agrees", "of drafted accepted", "tokens a step", "cost by bytes", "at best"),
        *("calibration error", "its classifier's"),
    )
    rows = [
        (
            *(str(one.layers), f"{one.lens:.1%}", f"{one.agreement:.1%}", f"{one.accepted:.1%}"),
            *(f"{one.tokens_per_step:.2f}", f"{one.cost:.2f}", f"{one.promise:.2f}"),
            *(f"{one.calibration_error:.3f}", f"{one.judged:.3f}"),
        )
        for one in result.exits
    ]
    print_table(columns, rows)
    each = [
        (str(one.layers), f"{left.threshold:g}", f"{left.share:.1%}", _agreement(left), f"{left.cost:.2f}")
        for one in result.exits
        for left in one.leaving
    ]
    print_table(("left unchecked after", "when as sure as", "of tokens", "agree", "bytes at least"), each)
    say(f"on {result.tokens} tokens of fresh answers; training had seen {result.seen:.1%} of their runs of 8 tokens")
    say(f"the exit after {result.drafts} layers drafts")


def _agreement(left: Any) -> str:
    return f"{left.agreement:.1%}" if left.share else "no token"


def _progress() -> Callable[[str, float, float, str], None]:
    """How far it is: texts that are written, then seconds of the training."""
    units = {"texts": "texts", "training": "seconds"}
    at, before = "", 0

    def tell(name: str, done: float, total: float, remark: str) -> None:
        nonlocal at, before
        if name != at:
            at, before = name, int(done)
            status().start(name, max(int(total), 1), before, units[name])
        status().advance(int(done) - before, remark)
        before = int(done)

    return tell
