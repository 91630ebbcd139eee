"""bench token-cascade: a smaller model that writes tokens for a larger one, compared with it as a draft model."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.figures import Measurement, Plot, Table
from headrace.cli.measuring import add_measurement
from headrace.cli.options import ModelName, ModelOptions
from headrace.cli.output import say, status


def register(bench: typer.Typer) -> None:
    """Add the command."""
    add_measurement(
        bench,
        token_cascade,
        "cascade source threshold defer prompts rounds max_tokens json_file plot_file",
        (
            "headrace bench token-cascade LARGE --cascade SMALLER -i code.jsonl",
            "Compare a cascade with a draft by the same model.",
        ),
        plot="Draw agreement over speed into this SVG file.",
    )


def token_cascade(
    model: ModelName,
    options: ModelOptions,
    source: Annotated[
        Path, typer.Option("--input", "-i", exists=True, dir_okay=False, help="Prompts, one per line, or JSON lines.")
    ],
    threshold: Annotated[
        list[float] | None, typer.Option(min=0, max=1.01, help="Threshold of cascades by token; may be repeated.")
    ] = None,
    defer: Annotated[
        list[float] | None, typer.Option(min=-1, max=1, help="--defer-at of speculative cascades; may be repeated.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 10,
    batch: Annotated[int, typer.Option(min=1, max=64, help="Batch size for the timing.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds of all methods.")] = 3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=2, help="Most tokens of an answer.")] = 96,
) -> Measurement:
    """Compare cascades by token and speculative cascades with plain decoding and with a draft by the same smaller model.

    A draft changes no token, so a cascade is worth its loss only if it is faster than the draft.
    """
    if options.cascade is None:
        raise typer.BadParameter("bench token-cascade needs a smaller model of the same vocabulary: --cascade MODEL")
    if options.draft is not None or options.amateur is not None:
        raise typer.BadParameter("the model of --cascade is draft and amateur, too; leave --draft and --amateur out")
    from headrace.bench import token_cascade as bench
    from headrace.cli.opening import open_llm
    from headrace.training.heads import prompt_tokens
    from headrace.workflows.prompts import read_prompts

    texts = read_prompts(source, prompts)
    llm: Any = open_llm(model, replace(options, draft=options.cascade, amateur=options.cascade, speculate="draft"))
    status().start("measuring")
    methods = bench.methods(max_tokens, threshold or bench.THRESHOLDS, defer or bench.DEFER)
    result = bench.measure(llm, [prompt_tokens(llm, text) for text in texts], methods, batch=batch, rounds=rounds, say=say)
    llm.close()
    axes = "Cascade by token", "times as fast as plain", "larger model's choice, percent"
    plot = Plot(*axes, bench.lines(result), f"{Path(model).name} with {Path(options.cascade).name}")
    return Measurement(result, [Table(bench.COLUMNS, result["rows"]), bench.verdict(result)], plot)
