"""Command train-heads: train draft heads on a model's own answers."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headrace.cli.help import short_help
from headrace.cli.inputs import layers_of
from headrace.cli.interrupt import Interrupt, resumable
from headrace.cli.options import ModelName, with_groups, writable_folder
from headrace.cli.output import print_table, say, status

HeadKindName = Literal["heads", "feature", "exit"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "out kind exits source texts minutes tokens threads",
        ("headrace train-heads smollm2-135m -o heads", "Heads in the folder heads, trained on the model's own texts."),
        ("headrace train-heads MODEL -o heads -i prompts.txt --minutes 120", "Trained on its answers to your prompts."),
        ("headrace train-heads MODEL -o exits --kind exit --exits 10,20,25", "Exits after layers 10, 20 and 25."),
        ("headrace chat MODEL --draft heads", "Use the heads."),
    )
    app.command("train-heads", cls=short)(with_groups(train_heads))


def train_heads(
    model: ModelName,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", file_okay=False, help="Output folder; a run in it continues.", callback=writable_folder),
    ],
    kind: Annotated[
        HeadKindName,
        typer.Option(
            help="heads: one head per token ahead; feature: a layer that drafts token by token; exit: heads after some"
            " of the model's layers."
        ),
    ] = "feature",
    exits: Annotated[
        str | None, typer.Option(help="Layers with an exit, such as 10,20,25 (default: at 2, 4 and 5 sixths).")
    ] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--input", "-i", exists=True, dir_okay=False, help="Prompts, one per line (default: the model writes them)."
        ),
    ] = None,
    texts: Annotated[int, typer.Option(min=32, help="Number of training answers.")] = 2048,
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes of training, without writing the texts.")] = 45,
    tokens: Annotated[int, typer.Option(min=1, max=8, help="Tokens of a draft.")] = 3,
    vocab: Annotated[int, typer.Option(min=16, help="Vocabulary of the heads: the most frequent tokens of the texts.")] = 8192,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=8, help="Most tokens of an answer.")] = 256,
    rate: Annotated[float, typer.Option(min=1e-6, help="Highest learning rate.")] = 1e-3,
    batch: Annotated[int, typer.Option(min=1, help="Texts per step.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of prompts and answers.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Train draft heads for a model on its own answers; then use them with --draft OUT.

    A stopped run continues when the command is repeated. The answers with the model's hidden states, and the state of the
    training, are in OUT/work, which can be removed afterwards.
    """
    from headrace.cli.opening import fetch

    layers = _exit_layers(exits, kind)
    path = fetch(model)

    from headrace.training import exit_heads, heads
    from headrace.workflows.prompts import read_prompts

    prompts = [prompt for file in source or [] for prompt in read_prompts(file)]
    sizes = texts, minutes, tokens, vocab, max_tokens, rate, batch
    config = heads.HeadsConfig(str(kind), *sizes, prompts, layers, seed=seed, threads=threads)
    # Loading the model shows its own progress.
    status().finish()
    with resumable(out):
        if kind == "exit":
            _print_exits(exit_heads.train_exits(str(path), out, config, status(), Interrupt()))
            say(f"the exits are in {out}; use them with --draft {out}")
            return
        report = heads.train_heads(str(path), out, config, status(), Interrupt())
    rows = [(str(position + 1), f"{share:.0%}") for position, share in enumerate(report.agreement)]
    print_table(("tokens ahead", "all agree with the model"), rows)
    say(f"held-out prompts: {report.accepted:.0%} of drafted tokens accepted, {report.tokens_per_step:.2f} tokens a step")
    say(f"the heads are in {out}; use them with --draft {out}")


def _exit_layers(exits: str | None, kind: HeadKindName) -> tuple[int, ...]:
    if exits is not None and kind != "exit":
        raise typer.BadParameter(f"--exits is for --kind exit, not {kind}; leave one of the two out")
    return layers_of(exits, "--exits")


def _print_exits(report: Any) -> None:
    columns = (
        *("after layer", "logit lens", "exit agrees", "drafts accepted", "tokens a step", "cost by bytes", "at best"),
        *("calibration error", "classifier's error"),
    )
    rows = [
        (
            *(str(exit.layers), f"{exit.lens:.1%}", f"{exit.agreement:.1%}", f"{exit.accepted:.1%}"),
            *(f"{exit.tokens_per_step:.2f}", f"{exit.cost:.2f}", f"{exit.promise:.2f}"),
            *(f"{exit.calibration_error:.3f}", f"{exit.classifier_error:.3f}"),
        )
        for exit in report.exits
    ]
    print_table(columns, rows)
    thresholds = [
        (
            *(str(exit.layers), f"{unchecked.threshold:g}", f"{unchecked.share:.1%}"),
            *(_agreement(unchecked), f"{unchecked.cost:.2f}"),
        )
        for exit in report.exits
        for unchecked in exit.unchecked
    ]
    print_table(("exit after layer", "threshold", "share of tokens", "agree", "least bytes"), thresholds)
    say(f"on {report.tokens} tokens of fresh answers; training had seen {report.seen:.1%} of their runs of 8 tokens")
    say(f"the exit after {report.drafts} layers drafts")


def _agreement(unchecked: Any) -> str:
    return f"{unchecked.agreement:.1%}" if unchecked.share else "no token"
