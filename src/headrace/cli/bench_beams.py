"""bench beams, bench sharing: what beam search costs in time and in memory."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.files import writable
from headrace.cli.help import short_help
from headrace.cli.output import print_table, say
from headrace.cli.status import status
from headrace.data.progress import counted


def register(bench: typer.Typer) -> None:
    """Add the commands."""
    beams_help = short_help(
        "",
        ("headrace bench beams smollm2-135m --no-peer", "Beside as many independent sequences."),
    )
    bench.command("beams", cls=beams_help)(beams)
    sharing_help = short_help(
        "",
        ("headrace bench sharing MODEL -i prompts.txt", "Blocks of 2, 4 and 6 samples and beams."),
    )
    bench.command("sharing", cls=sharing_help)(sharing)


def beams(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, or a catalog name that has one.")],
    width: Annotated[int, typer.Option(min=2, max=16, help="Beams of each request.")] = 4,
    peer: Annotated[bool, typer.Option(help="Beside OpenVINO GenAI's beam search.")] = True,
    install: Annotated[bool, typer.Option("--install", help="Install it, in its own environment.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements, after one to warm up.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; every core where not given.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """One and eight requests of beam search: tokens/s of the best hypotheses, beside a peer and beside as many independent
    sequences, in turns."""
    from headrace.bench import beams as bench
    from headrace.bench import engines

    if peer:
        engines.make_ready([bench.peer()], install, say)
    status().start("measuring")
    result = bench.compare(model, width, (1, 8), beside=peer, rounds=rounds, threads=threads, say=say)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")
    columns = ("cell", "tokens/s", "time / independent", "openvino", "ratio", "interval", "other load")
    print_table(columns, [_row(name, found) for name, found in result["cells"].items()])


def _row(cell: str, found: dict[str, Any]) -> tuple[str, ...]:
    speed = found["tokens_per_s"]
    against = ("-", "-", "-")
    if "ratio" in found:
        against = (f"{speed['openvino']:.1f}", f"{found['ratio']:.2f}", "{:.2f} to {:.2f}".format(*found["interval"]))
    return (cell, f"{speed['headrace']:.1f}", f"{found['over_independent']:.2f}", *against, f"{found['others_cpu']:.0%}")


def sharing(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A catalog name, a GGUF file, a folder, a hub id.")],
    source: Annotated[Path, typer.Option("--input", "-i", exists=True, dir_okay=False, help="Prompts, one a line.")],
    prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 16,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Tokens of each answer at most.")] = 64,
    chat: Annotated[bool, typer.Option(help="Through the chat template.")] = False,
) -> None:
    """KV blocks of parallel samples and of beams, with and without sharing, on the same prompts."""
    from headrace.bench import sharing as bench
    from headrace.cli.opening import open_llm
    from headrace.cli.options import ModelOptions
    from headrace.workflows.prompts import read_prompts, tokens_of

    llm = open_llm(model, ModelOptions(), max_num_seqs=max(bench.WIDTHS))
    ids = [tokens_of(llm, text, chat) for text in read_prompts(source, prompts)]
    status().start("measuring")
    rows = bench.measure(llm, ids, max_tokens)
    mean = sum(map(len, ids)) / len(ids)
    say(f"{counted(len(ids), 'prompts')} of {mean:.0f} tokens on average, answers of {max_tokens} at most, blocks of 16 tokens")
    lines = [(one.method, str(one.width), f"{one.unshared:.1f}", f"{one.shared:.1f}", f"{one.saved:.1%}") for one in rows]
    print_table(("method", "width", "blocks unshared", "blocks shared", "saved"), lines)
