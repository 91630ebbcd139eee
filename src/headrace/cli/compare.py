"""Command compare: decoding methods on the same prompts."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.bench.figures import Table
from headrace.cli.help import short_help
from headrace.cli.opening import open_llm
from headrace.cli.options import ModelName, ModelOptions, with_groups, writable
from headrace.cli.output import print_table, say, status
from headrace.data.progress import counted


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "source modes csv prompts max_tokens seed raw amateur",
        ("headrace compare MODEL -i prompts.txt --modes greedy,sample,beam4 --prompts 8", "Three methods on eight prompts."),
    )
    app.command(cls=short)(with_groups(compare))


def compare(
    model: ModelName,
    options: ModelOptions,
    source: Annotated[
        Path,
        typer.Option(
            "--input",
            "-i",
            exists=True,
            dir_okay=False,
            help="Prompts, one per line: lines of generate in a .jsonl file, otherwise plain texts.",
        ),
    ],
    modes: Annotated[
        str, typer.Option(help="Methods, such as greedy,sample,beam4,best4,contrastive; an unknown name lists all of them.")
    ] = "greedy,sample,beam4",
    csv: Annotated[
        Path | None, typer.Option("--csv", "-o", help="Write every answer with its figures to this file.", callback=writable)
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Number of prompts to use (default: all).")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Most tokens of an answer.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the sampling methods.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue plain texts without the chat template.")] = False,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences in a batch.")] = 32,
) -> None:
    """Compare decoding methods on the same prompts: tokens/s, repetition, KV blocks.

    rep-4: share of an answer's 4-grams that repeat earlier ones. distinct-4: different 4-grams divided by all 4-grams of a
    method's answers. blocks: mean over requests of the most KV blocks held, 16 tokens each. Of the fields of a line only
    max_tokens is used; fields that a method sets are refused.
    """
    from headrace.bench import strategies
    from headrace.cli.compare_prompts import line_of, read_lines
    from headrace.data.params import SamplingParams

    options.check()
    names = _names(modes, options.amateur, max_tokens, seed)
    jobs = read_lines(source, prompts)
    llm = open_llm(model, options, max_num_seqs=max_num_seqs, preset="offline", enable_prefix_caching=False)
    lines = [line_of(llm, job, raw) for job in jobs]
    ids, limits = [line.ids for line in lines], [line.max_tokens or max_tokens for line in lines]
    # Warm-up: the first steps of a process are slow.
    llm.generate([ids[0]], SamplingParams(max_tokens=8))
    compared = []
    status().start("comparing", len(names) * len(ids), unit="answers")
    for name in names:
        say(f"{name}: {counted(len(ids), 'prompts')} …")
        compared += strategies.compare(llm, ids, [name], limits, seed)
        status().advance(len(ids), name)
    status().finish()
    heads, *rows = Table(strategies.COLUMNS, compared).cells()
    print_table(heads, rows)
    if csv is not None:
        strategies.write_csv(csv, compared)
        say(f"{counted(len(ids), 'prompts')}, {counted(len(names), 'methods')}: {csv}")


def _names(modes: str, amateur: str | None, max_tokens: int, seed: int) -> list[str]:
    """Return the names of the methods. Raises before the model is loaded if one is invalid."""
    from headrace.bench import strategies

    names = [name.strip() for name in modes.split(",") if name.strip()]
    if not names:
        raise typer.BadParameter(f"--modes names no method; choose from {', '.join(strategies.MODES)}")
    for name in names:
        strategies.mode(name, max_tokens, seed)
    if "contrastive-decoding" in names and amateur is None:
        raise typer.BadParameter("contrastive-decoding needs a smaller model of the same vocabulary: --amateur MODEL")
    return names
