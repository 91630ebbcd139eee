"""bench kv: what number formats of K and V cost and gain."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.files import writable
from headrace.cli.help import short_help
from headrace.cli.output import print_table, say
from headrace.cli.status import status


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "text limit cells rounds threads json_file",
        ("headrace bench kv smollm2-135m --text wiki.txt", "What is lost in int8 and int4, and by which part of K and V."),
        ("headrace bench kv smollm2-135m --cells b1_8k", "Tokens/s at a context of 8,000 tokens."),
    )
    bench.command("kv", cls=short)(kv)


def kv(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A catalog name, a GGUF file, a folder, a hub id.")],
    text: Annotated[
        Path | None, typer.Option("--text", exists=True, dir_okay=False, help="A text: how far predictions of it move.")
    ] = None,
    limit: Annotated[int, typer.Option(min=2, help="Tokens of it that are fed; half of them are scored.")] = 8192,
    window: Annotated[int, typer.Option(min=2, help="Tokens of one piece of it.")] = 512,
    cells: Annotated[str, typer.Option(help="Speeds to measure, as b1_4k,b1_8k (see bench local).")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of every cell, after one to warm up.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; every core where not given.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """K and V in bfloat16, int8 and int4: bytes a token, what is lost on a text, tokens/s at long contexts.

    What is lost is measured in float32 torch, where nothing else is rounded. Keys are less their mean over other pieces of the
    text, as `headrace compress --kv` keeps them, but where a line says "as it is". By channel, keys lose less, but what one
    becomes depends on those after it: no request could be answered alike in another batch.
    """
    if text is None and not cells:
        raise typer.BadParameter("give --text FILE, --cells b1_8k, or both")
    from headrace.bench import kv as bench
    from headrace.bench import local

    wanted = local.pick(cells) if cells else []
    result: dict[str, Any] = {"model": model}
    if text is not None:
        result |= _losses(model, text, limit, window, threads)
    if wanted:
        status().start("measuring", len(wanted), unit="cells")
        result["cells"] = bench.speeds(model, wanted, rounds=rounds, threads=threads, say=say, done=_done)
        status().finish()
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    _print(result)


def _losses(model: str, text: Path, limit: int, window: int, threads: int | None) -> dict[str, Any]:
    import torch

    from headrace.bench import kv as bench
    from headrace.cli.opening import look_at
    from headrace.compress.mean_keys import TOKENS, mean_keys
    from headrace.compress.texts import check_apart, draw_texts, passage_hashes

    if threads is not None:
        torch.set_num_threads(threads)
    opened = look_at(model)
    scored = draw_texts(opened, str(text), limit, 0, status(), window, judging=True)
    measured = draw_texts(opened, str(text), TOKENS, 0, status(), window)
    check_apart(passage_hashes(measured), scored)
    perplexity, losses = bench.losses(opened.source, scored, mean_keys(opened.source, measured, status()), tell=status())
    tokens = sum(len(one) // 2 for one in scored)
    return {"tokens": tokens, "perplexity": perplexity, "formats": [one.record() for one in losses]}


def _done(figures: dict[str, Any]) -> None:
    """A cell as soon as it is measured."""
    say(f"{figures['cell']}: int4 {figures['tokens_per_s']['int4']:.1f} tokens/s, {figures['ratio']:.3f} of int8")
    status().advance(1)


def _print(result: dict[str, Any]) -> None:
    if "formats" in result:
        columns = ("K AND V", "BYTES A TOKEN", "NATS LOST", "KL", "SAME CHOICE")
        print_table(columns, [_row(one) for one in result["formats"]])
        say(f"perplexity {result['perplexity']:.3f} in float32, {result['tokens']:,} tokens scored")
    for cell, figures in result.get("cells", {}).items():
        by_name = ", ".join(f"{name} {speed:.1f}" for name, speed in figures["tokens_per_s"].items())
        low, high = figures["interval"]
        print(f"{cell}: {by_name} tokens/s; int4 {figures['ratio']:.3f} of int8 ({low:.3f} to {high:.3f})")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    error = "" if one["nll_error"] is None else f" ± {one['nll_error']:.4f}"
    return (
        *(one["name"], f"{one['token_bytes']:,.0f}", f"{one['nll']:+.4f}{error}"),
        *(f"{one['kl']:.4f}", f"{one['same_choice']:.1%}"),
    )
