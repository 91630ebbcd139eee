"""Command distil: train a smaller model on the outputs of a larger one."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import short_help
from headrace.cli.inputs import layers_of
from headrace.cli.interrupt import Interrupt, resumable
from headrace.cli.options import ModelName, with_groups, writable_folder
from headrace.cli.output import print_table, say, status

PANEL = "Losses"


def _of_loss(help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=PANEL, **more)


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "out student loss texts steps minutes as_draft",
        (
            "headrace distil MODEL -o OUT --student depth=20 --minutes 30",
            "20 of its layers, trained on texts that it writes itself.",
        ),
        (
            "headrace distil MODEL -o OUT --student PRUNED --loss kl,ce --texts train.txt --steps 500",
            "Repair a pruned or quantised model.",
        ),
        ("headrace distil MODEL -o OUT --student depth=8 --as-draft", "A draft model for --draft OUT."),
        (
            "headrace distil ENCODER -o OUT --student depth=3 --loss features,cosine --texts lines.txt --steps 500",
            "Half of an encoder's layers.",
        ),
    )
    app.command(cls=short)(with_groups(distil))


@dataclass
class LossOptions:
    """Losses of a distillation and their settings: fields of training.distil.DistilConfig."""

    temperature: Annotated[float, _of_loss("kl: temperature of the logits.", min=0.01)] = 2.0
    share: Annotated[
        float, _of_loss("kl together with ce, sequence or steps: weight of kl; the other gets the rest.", min=0.0, max=1.0)
    ] = 0.5
    reasons: Annotated[float, _of_loss("steps: weight of rationales compared with answers.", min=0.0)] = 1.0
    count: Annotated[int, _of_loss("Number of texts or answers that the teacher writes.", min=8)] = 256
    window: Annotated[int, _of_loss("Tokens per text.", min=8, max=1024)] = 256
    exits: Annotated[str | None, _of_loss("exits: layers of the student with an exit, such as 10,20.")] = None

    def values(self) -> dict[str, Any]:
        """Return the fields of a DistilConfig."""
        return asdict(self) | {"exits": layers_of(self.exits, "--exits")}


@dataclass
class TrainingOptions:
    """Budget and optimizer settings of a training."""

    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None
    minutes: Annotated[float | None, typer.Option(min=0.001, help="Minutes of training, without writing the texts.")] = None
    batch: Annotated[int, typer.Option(min=1, help="Texts per step.")] = 4
    rate: Annotated[
        float | None, typer.Option(min=1e-7, help="Highest learning rate (default: 1e-4; 1e-3 for random weights).")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of texts, their order, and random weights.")] = 0
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None
    backend: Annotated[str, typer.Option(help="Back end of the teacher: native (its own format), torch (float32), auto.")] = (
        "auto"
    )

    def values(self) -> dict[str, Any]:
        """Return the fields of a DistilConfig, with its budget."""
        from headrace.training.run import Budget

        values = asdict(self)
        budget = Budget(values.pop("steps"), values.pop("minutes"))
        return {**values, "budget": budget}


def distil(
    model: ModelName,
    losses: LossOptions,
    training: TrainingOptions,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", file_okay=False, help="Output folder; an existing run in it continues.", callback=writable_folder
        ),
    ],
    student: Annotated[
        str,
        typer.Option(
            help="layers:0,1,5-9: these layers of MODEL; depth=20: that many, evenly spaced; depth=8,width=384: random"
            " weights; or a model with the same vocabulary."
        ),
    ],
    loss: Annotated[
        str,
        typer.Option(
            help="kl (probabilities), ce (tokens of the texts), features (hidden states), cosine (their direction), "
            "attention (maps), exits (at some layers), sequence (MODEL's answers), steps (rationales); several "
            "with commas. Encoders (BERT, MiniLM): features and cosine, on a file with a text on each line."
        ),
    ] = "kl",
    texts: Annotated[
        str,
        typer.Option(
            help="Training texts: a file, or self (MODEL writes them). sequence: prompts; steps: JSON lines with "
            '"prompt", "rationale", "answer".'
        ),
    ] = "self",
    as_draft: Annotated[
        bool, typer.Option("--as-draft", help="Measure the student as a draft model for MODEL, before and after.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a smaller model on the outputs of MODEL, or repair a pruned or quantised one. OUT is a model folder.

    A stopped run continues when the command is repeated; its state is in OUT/work, which can be removed afterwards. Check the
    licence of MODEL: some forbid training other models on its outputs.
    """
    if (training.steps is None) == (training.minutes is None):
        raise typer.BadParameter("give --steps or --minutes")

    from headrace.cli.opening import fetch

    path = fetch(model)

    from headrace.training.distil import DistilConfig, distil
    from headrace.workflows.prompts import read_prompts

    names = tuple(name.strip() for name in loss.lower().split(","))
    prompts = read_prompts(Path(texts)) if "sequence" in names and texts != "self" else []
    chosen: dict[str, Any] = {"student": student, "losses": names, "texts": texts, "prompts": prompts, "as_draft": as_draft}
    config = DistilConfig(**chosen, **training.values(), **losses.values())
    with resumable(out):
        result = distil(path, out, config, status(), Interrupt())
    status().finish()
    _print(result, out, as_json)


def _print(result: Any, out: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(result), indent=2))
        return
    before, after = result.before, result.after
    small, large = result.weights
    if hasattr(before, "cosine"):
        rows = [
            ("cosine with the teacher's", f"{before.cosine:.4f}", f"{after.cosine:.4f}", "1"),
            ("nearest text as its", f"{before.same_nearest:.1%}", f"{after.same_nearest:.1%}", "100%"),
        ]
        print_table(("embeddings of held-out texts", "before", "after", "teacher"), rows)
        say(f"{small / 1e6:,.1f} of {large / 1e6:,.1f} million weights; {result.steps:,} steps in {result.seconds:,.0f} s")
        say(f"the student is in {out}")
        return
    rows = [
        ("perplexity", f"{before.perplexity:.3f}", f"{after.perplexity:.3f}", f"{after.perplexity_before:.3f}"),
        ("KL to it, nats", f"{before.kl:.4f}", f"{after.kl:.4f}", "0"),
        ("first choice as its", f"{before.same_choice:.1%}", f"{after.same_choice:.1%}", "100%"),
    ]
    drafting = result.drafting
    if drafting is not None:
        rows.append(("drafts accepted", f"{drafting.before:.1%}", f"{drafting.after:.1%}", "100%"))
    print_table(("on held-out texts", "before", "after", "teacher"), rows)
    say(f"{small / 1e6:,.1f} of {large / 1e6:,.1f} million weights; {result.steps:,} steps in {result.seconds:,.0f} s")
    say(f"{result.tokens:,} tokens seen, {result.different:,} of them different; the teacher's back end: {result.backend}")
    if drafting is not None:
        formula = f"(1 + {drafting.after:.2f}) / (1 + {drafting.cost:.2f}) = {drafting.speed:.2f} at the most"
        say(
            f"as a draft model it {'may be faster' if drafting.speed > 1 else 'is slower'}: {formula}, if both are stored alike"
        )
    say(f"the student is in {out}")
