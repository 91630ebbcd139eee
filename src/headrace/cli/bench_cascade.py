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
    example = "headrace bench cascade SMALL LARGE -i questions.jsonl --price 0.33", "Savings by deferral, and a threshold."
    add_measurement(bench, cascade, "source price score match most json_file", example)


def cascade(
    small: Annotated[str, typer.Argument(metavar="SMALL", help="The first model: a catalog name, a GGUF file or a folder.")],
    large: Annotated[str, typer.Argument(metavar="LARGE", help="The model for questions that SMALL defers.")],
    source: Annotated[
        Path,
        typer.Option(
            "--input", "-i", exists=True, dir_okay=False, help='JSON lines with "prompt", "answer" and optional "choices".'
        ),
    ],
    price: Annotated[
        float, typer.Option(min=0.0, help="Cost of a token of SMALL relative to LARGE: the ratio of their bytes.")
    ],
    score: Annotated[str, typer.Option(help="Confidence of SMALL: min, mean, low or vote.")] = "min",
    match: Annotated[str, typer.Option(help="When a free answer is right: exact, number (the last one), within.")] = "exact",
    most: Annotated[int | None, typer.Option(min=4, help="Number of questions to use (default: all).")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Most tokens of a free answer.")] = 256,
    delta: Annotated[float, typer.Option(help="Share of answers that may be lost compared with LARGE alone.")] = 0.05,
    epsilon: Annotated[float, typer.Option(help="Probability that the bound does not hold.")] = 0.05,
) -> Measurement:
    """Measure the loss and the savings of a cascade of two models on questions with known answers, and find a threshold with a
    bound.

    A cascade lowers the cost of a batch, not the time of each answer: a deferred question costs both models.
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
