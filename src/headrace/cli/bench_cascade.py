"""bench cascade: a small model that passes on what it is not sure of."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.files import writable
from headrace.cli.help import short_help
from headrace.cli.options import ModelOptions, with_groups
from headrace.cli.output import print_table, say


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "source price score match most json_file",
        (
            "headrace bench cascade SMALL LARGE -i questions.jsonl --price 0.33",
            "What deferring saves, and a threshold.",
        ),
    )
    bench.command("cascade", cls=short)(with_groups(cascade))


def cascade(
    small: Annotated[str, typer.Argument(metavar="SMALL", help="Who is asked first: a catalog name, a GGUF file, a folder.")],
    large: Annotated[str, typer.Argument(metavar="LARGE", help="Who answers what the first one is not sure of.")],
    source: Annotated[
        Path,
        typer.Option("--input", "-i", exists=True, dir_okay=False, help='JSON lines: "prompt", "answer", perhaps "choices".'),
    ],
    price: Annotated[float, typer.Option(min=0.0, help="A token of SMALL, where one of LARGE is 1: its share of the bytes.")],
    score: Annotated[str, typer.Option(help="How sure SMALL is: min, mean, low or vote.")] = "min",
    match: Annotated[str, typer.Option(help="A free answer is right: exact, number (the last), within.")] = "exact",
    most: Annotated[int | None, typer.Option(min=4, help="Only so many questions.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Tokens of a free answer at most.")] = 256,
    delta: Annotated[float, typer.Option(help="The share of answers that may be lost against LARGE alone.")] = 0.05,
    epsilon: Annotated[float, typer.Option(help="How often that may not hold.")] = 0.05,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """What a cascade of two models loses and saves on questions with known answers, and a threshold with a guarantee.

    A cascade lowers the cost of a batch, not the time of each answer: what is passed on pays for both models.
    """
    from headrace.bench import cascade as bench
    from headrace.cli.opening import open_llm
    from headrace.data.params import SamplingParams
    from headrace.workflows.cascade import SCORES

    for name, given, known in (("score", score, SCORES), ("match", match, tuple(bench.MATCHES))):
        if given not in known:
            raise typer.BadParameter(f"--{name} takes {', '.join(known)}, not {given!r}")
    questions = bench.read_questions(source, most)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    several = params.replace(n=5, temperature=0.7, seed=0) if score == "vote" else params
    answered = []
    for name, how, by in ((small, several, score), (large, params, "min")):
        llm: Any = open_llm(name, ModelOptions())
        answered.append(bench.ask(llm, questions, by, how, match))  # type: ignore[arg-type]
        llm.close()
        say(f"{name}: {sum(answered[-1].right)} of {len(questions)} right, {answered[-1].seconds:.1f} s")
    figures = {"price": price, "delta": delta, "epsilon": epsilon}
    result = bench.judge(*answered, score=score, **figures)  # type: ignore[arg-type]
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    rows = [tuple(f"{one[key]:.3f}" for key in ("share", "accuracy", "by_chance", "cost")) for one in result["curve"]]
    print_table(("deferred", "right", "by chance", "cost a question"), rows)
    for line in _lines(result):
        print(line)


def _lines(result: dict[str, Any]) -> list[str]:
    chosen, held, at = result["calibration"], result["held_out"], result["at_20"]
    quality = f"AUROC of the score {result['auroc']:.2f}; a fifth deferred: {at['gain']:+.3f} beside chance (p {at['p']:.3f})"
    pays = f"it is cheaper than LARGE alone below {result['break_even']:.0%} deferred"
    if chosen["threshold"] is None:
        shown = f"no threshold loses at most {chosen['delta']:g} for sure on {chosen['n']} questions: LARGE answers everything"
        return [quality, pays, shown]
    shown = (
        f"threshold {chosen['threshold']:.2f}: loses at most {chosen['delta']:g} with probability {1 - chosen['epsilon']:g}, "
        f"for questions like the {chosen['n']} it was chosen on"
    )
    kept = (
        f"the other half: {held['accuracy']:.3f} right (LARGE alone {held['large']:.3f}), lost {held['loss']:.3f}, "
        f"{held['deferred']:.0%} deferred, cost {held['cost']:.2f} of LARGE alone"
    )
    return [quality, pays, shown, kept]
