"""bench tools: calls of tools with known answers, held to their schemas and free."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.files import writable
from headrace.cli.help import short_help
from headrace.cli.options import ModelName, ModelOptions, with_groups
from headrace.cli.output import print_table, say

SHOWN = 10  # names of cases that are not valid; the JSON file has all


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "data answers most at_once max_tokens penalty json_file",
        (
            "headrace bench tools MODEL --data BFCL_v4_simple_python.json --most 50",
            "Fifty questions, held and free.",
        ),
    )
    bench.command("tools", cls=short)(with_groups(tools))


def tools(
    model: ModelName,
    options: ModelOptions,
    data: Annotated[Path, typer.Option(help="Questions and functions: BFCL's simple_python.", exists=True, dir_okay=False)],
    answers: Annotated[
        Path | None, typer.Option(help="Their known answers (default: simple_python.answers.json beside it).", dir_okay=False)
    ] = None,
    most: Annotated[int | None, typer.Option(min=1, help="Only so many cases.")] = None,
    at_once: Annotated[int, typer.Option(min=1, max=256, help="Cases in the batching loop at a time.")] = 32,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=2, help="Tokens of each answer at most.")] = 1024,
    penalty: Annotated[float, typer.Option("--repetition-penalty", help="Above 1 ends lists that repeat for ever.")] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """How many tool calls fit their schema, and how many are right, with the calls' grammar and without.

    Each case is asked as the server asks it, greedily. Valid: the function's name, and arguments that fit its schema. Right:
    these arguments are among the known answers. Loose: free, and a JSON object anywhere in the text counts as its call.
    """
    from headrace.cli.opening import open_llm
    from headrace.cli.serve import check_installed

    check_installed()
    from headrace.bench.tools import measure_tools, read_cases

    cases = read_cases(data, answers, most)
    llm: Any = open_llm(model, options, max_num_seqs=at_once)
    results = measure_tools(llm, cases, at_once=at_once, max_tokens=max_tokens, penalty=penalty, say=say)
    print_table(
        ("", "called", "valid", "right", "cut off", "tokens", "tokens/s"), [_row(way, one) for way, one in results.items()]
    )
    for way, one in results.items():
        if one.invalid:
            more = f" and {len(one.invalid) - SHOWN} more" if len(one.invalid) > SHOWN else ""
            print(f"not valid, {way}: {', '.join(one.invalid[:SHOWN])}{more}")
    if json_file is not None:
        json_file.write_text(json.dumps({way: one.plain() for way, one in results.items()}, indent=2) + "\n", "utf-8")


def _row(way: str, one: Any) -> tuple[str, ...]:
    share = lambda count: f"{count} of {one.cases} ({count / max(one.cases, 1):.1%})"  # noqa: E731
    speed = f"{one.tokens / max(one.seconds, 1e-9):.1f}"
    return (way, share(one.called), share(one.valid), share(one.right), str(one.cut), str(one.tokens), speed)
