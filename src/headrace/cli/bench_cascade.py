"""bench cascade: a small model that defers uncertain questions to a large one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.figures import Measurement, Table
from headrace.cli.measuring import add_measurement
from headrace.cli.options import ModelOptions
from headrace.cli.output import say


def register(bench: typer.Typer) -> None:
    """Add the command."""
    example = "headrace bench cascade SMALL LARGE -i questions.jsonl --price 0.33", "What deferring saves, and a threshold."
    add_measurement(bench, cascade, "source price score match most json_file", example)


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
) -> Measurement:
    """What a cascade of two models loses and saves on questions with known answers, and a threshold with a guarantee.

    A cascade lowers the cost of a batch, not the time of each answer: what is passed on pays for both models.
    """
    from headrace.bench import cascade as bench
    from headrace.bench.questions import read_questions
    from headrace.cli.opening import open_llm
    from headrace.data.params import SamplingParams
    from headrace.workflows.cascade import SCORES

    for name, given, known in (("score", score, SCORES), ("match", match, tuple(bench.MATCHES))):
        if given not in known:
            raise typer.BadParameter(f"--{name} takes {', '.join(known)}, not {given!r}")
    questions = read_questions(source, most)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    several = params.replace(n=5, temperature=0.7, seed=0) if score == "vote" else params
    answered = []
    for name, how, by in ((small, several, score), (large, params, "min")):
        llm: Any = open_llm(name, ModelOptions())
        answered.append(bench.answer(llm, questions, by, how, match))  # type: ignore[arg-type]
        llm.close()
        say(f"{name}: {sum(answered[-1].right)} of {len(questions)} right, {answered[-1].seconds:.1f} s")
    figures = {"price": price, "delta": delta, "epsilon": epsilon}
    result = {"models": [small, large]} | bench.judge(*answered, score=score, **figures)  # type: ignore[arg-type]
    return Measurement(result, [Table(bench.COLUMNS, result["curve"]), *bench.summary(result)])
