"""bench self-draft: choose the part of a model that drafts for it."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.help import short_help
from headrace.cli.options import ModelName
from headrace.cli.output import print_table, say, status

PROMPTS = (
    "Write a Python function that counts the vowels in a text.",
    "Explain in three sentences how a water mill works.",
    "List five things to check before a long walk in the mountains.",
    "Summarise the story of Robinson Crusoe for a child.",
)


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "",
        ("headrace bench self-draft MODEL --minutes 5", "Save a gain for --speculate self."),
    )
    bench.command("self-draft", cls=short)(self_draft)


def self_draft(
    model: ModelName,
    source: Annotated[
        Path | None, typer.Option("--input", "-i", exists=True, dir_okay=False, help="Prompts, one per line.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.05, max=10, help="Minutes of the search.")] = 5,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=8, help="Tokens of each text that are compared.")] = 48,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    keep: Annotated[bool, typer.Option(help="Save the choice for speculate='self' if it is faster.")] = True,
) -> None:
    """Search the layers or sublayers with which a model drafts for itself.

    Times are measured, so two searches may choose different parts. The best part is measured five times again, and saved if it
    is faster than plain decoding each time.
    """
    from headrace.backends.recipe import BLOCK_SIZE
    from headrace.cli.opening import open_llm
    from headrace.cli.options import ModelOptions
    from headrace.data.params import SamplingParams
    from headrace.startup.selfdraft import save
    from headrace.training.selfdraft import SpanTrial, search
    from headrace.workflows.prompts import read_prompts, tokens_of

    llm = open_llm(model, ModelOptions(threads=threads, speculate="off"))
    prompts = [tokens_of(llm, text, True) for text in (PROMPTS if source is None else read_prompts(source, 8))]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    texts = [(output.prompt_token_ids + output.outputs[0].token_ids, len(output.prompt_token_ids)) for output in outputs]
    trial = SpanTrial(llm.runner, texts, BLOCK_SIZE, llm.model_config.num_layers)
    status().start("searching")
    best = search(trial, minutes * 60, lambda rated: say(rated.summary))
    slowest, fastest = trial.repeat(best)
    columns = ("part", "agreement", "cost of a draft step", "draft tokens", "speed-up", "measured again")
    row = (best.name, f"{best.alpha:.3f}", f"{best.cost:.3f}", str(best.gamma), f"{best.speedup:.2f}")
    print_table(columns, [(*row, f"{slowest:.2f} to {fastest:.2f}")])
    if fastest <= 1.0:
        say("no part is faster than plain decoding; nothing was saved")
    elif slowest <= 1.0:
        say("the gain is within the noise of the measurement; nothing was saved")
    elif keep:
        say(f"saved in {save(llm.opened.path, best.span)}; use it with --speculate self")
