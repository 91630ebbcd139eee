"""bench refine: filling in blocks beside decoding token by token."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.files import writable
from headrace.cli.help import short_help
from headrace.cli.options import ModelName, ModelOptions, with_groups
from headrace.cli.output import print_table, say

MOST_DRAFTED = 16
DRAFTERS: dict[str, tuple[str, ...]] = {
    "both": ("jacobi", "blocks"),
    "jacobi": ("jacobi",),
    "blocks": ("blocks",),
    "none": (),
}


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "source block passes shorter drafts most max_tokens json_file",
        ("headrace bench refine numbers -i numbers/prompts.jsonl", "A model of headrace train-masked, by passes."),
    )
    bench.command("refine", cls=short)(with_groups(refine))


def refine(
    model: ModelName,
    source: Annotated[
        Path,
        typer.Option(
            "--input", "-i", exists=True, dir_okay=False, help='JSON lines: "prompt", perhaps "answers" (or "answer").'
        ),
    ],
    block: Annotated[int, typer.Option(min=1, max=64, help="Tokens of a block.")] = 8,
    passes: Annotated[str, typer.Option(help="Passes over a block, as in 1,2,4,8.")] = "1,2,4,8",
    shorter: Annotated[str, typer.Option(help="Shorter blocks, filled in by one pass each: semi-autoregressive.")] = "4,2",
    drafts: Annotated[str, typer.Option(help="What drafts beside plain decoding: jacobi, blocks, both or none.")] = "both",
    most: Annotated[int | None, typer.Option(min=1, help="Only so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Tokens of an answer at most.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the fastest counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """Filling in blocks beside decoding token by token: tokens a step, right answers and time, by passes.

    A model with a mask token is needed: headrace train-masked makes small ones. Drafts are of the same model, by Jacobi's
    iteration and by open blocks, and verified: the answers are those of plain decoding.
    """
    from headrace.bench import refine as bench
    from headrace.cli.opening import open_llm

    numbers, sizes, drafters = _numbers("--passes", passes), _numbers("--shorter", shorter), _drafters(drafts)
    questions = bench.read_questions(source, most)
    llm = open_llm(model, ModelOptions(threads=threads, speculate="off"))
    if llm.model_config.mask_id is None:
        raise ValueError(f"{model} has no mask token, so it fills in no blocks; headrace train-masked makes models that do")
    deep = min(block, MOST_DRAFTED)
    drafting = {
        name: open_llm(model, ModelOptions(threads=threads, speculate=name, draft_tokens=deep), quiet=True) for name in drafters
    }
    measured = bench.measure(llm, questions, block, numbers, max_tokens, rounds, sizes, drafting)
    for each in (llm, *drafting.values()):
        each.close()
    if json_file is not None:
        json_file.write_text(json.dumps(bench.figures(measured), indent=2) + "\n", "utf-8")
    rows = [
        (
            *(one.way, "-" if one.right is None else f"{one.right:.1%}", f"{one.agree:.1%}"),
            *(f"{one.steps:.1f}", f"{one.tokens_per_step:.2f}", f"{one.speed:.2f}"),
        )
        for one in measured
    ]
    print_table(("passes", "right", f"as {block} passes", "steps", "tokens a step", "speed"), rows)
    say(f"{len(questions)} prompts in one batch; a block's causal pass, which keeps its tokens, counts as a step")
    if "blocks" in drafters:
        say("blocks that are verified take an open pass beside each step, which does not count")


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",") if one.strip()]
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers, as in 1,2,4,8, not {text!r}") from None


def _drafters(name: str) -> tuple[str, ...]:
    if name not in DRAFTERS:
        raise typer.BadParameter(f"--drafts takes {', '.join(DRAFTERS)}, not {name!r}")
    return DRAFTERS[name]
