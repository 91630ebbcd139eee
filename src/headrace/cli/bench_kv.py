"""bench kv: quality and speed of number formats of K and V."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.figures import Measurement, Table
from headrace.cli.measuring import Rounds, Threads, add_measurement
from headrace.cli.output import say, status


def register(bench: typer.Typer) -> None:
    """Add the command."""
    add_measurement(
        bench,
        kv,
        "text limit cells rounds threads json_file",
        ("headrace bench kv smollm2-135m --text wiki.txt", "Loss in int8 and int4, of K, of V and of both."),
        ("headrace bench kv smollm2-135m --cells b1_8k", "Tokens/s at a context of 8,000 tokens."),
    )


def kv(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A catalog name, a GGUF file, a folder, or a repository of the hub.")
    ],
    text: Annotated[
        Path | None, typer.Option("--text", exists=True, dir_okay=False, help="Text for measuring the loss.")
    ] = None,
    limit: Annotated[int, typer.Option(min=2, help="Tokens of the text; half of them are scored.")] = 8192,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    cells: Annotated[str, typer.Option(help="Cells to time, such as b1_4k,b1_8k (see bench local).")] = "",
    rounds: Rounds = 5,
    threads: Threads = None,
) -> Measurement:
    """Compare K and V in bfloat16, int8 and int4: bytes per token, loss on a text, tokens/s at long contexts.

    The loss is measured in float32 torch, where nothing else is quantised. Keys are centred by their mean over other parts of
    the text, as `headrace compress --kv` stores them, except in lines marked "not centred". Scales per channel would lose less,
    but then the K of a token depends on later tokens, and outputs would depend on the batch.
    """
    if text is None and not cells:
        raise typer.BadParameter("give --text FILE, --cells b1_8k, or both")
    from headrace.bench import kv as bench
    from headrace.bench import local

    wanted = local.pick(cells) if cells else []
    result: dict[str, Any] = {"model": model}
    printed: list[Table | str] = []
    if text is not None:
        result |= _losses(model, text, limit, window, threads)
        printed.append(Table(bench.COLUMNS, result["formats"]))
    if wanted:
        status().start("measuring", len(wanted), unit="cells")
        result["cells"] = bench.speeds(model, wanted, rounds=rounds, threads=threads, say=say, done=_done)
        status().finish()
        printed += bench.speed_lines(result["cells"])
    if text is not None:
        say(f"perplexity {result['perplexity']:.3f} in float32, {result['tokens']:,} tokens scored")
    return Measurement(result, printed)


def _losses(model: str, text: Path, limit: int, window: int, threads: int | None) -> dict[str, Any]:
    import torch

    from headrace.bench import kv as bench
    from headrace.cli.opening import look_at
    from headrace.compress.calibration_pass import TOKENS, mean_keys
    from headrace.compress.texts import check_apart, draw_texts, passage_hashes

    if threads is not None:
        torch.set_num_threads(threads)
    opened = look_at(model)
    scored = draw_texts(opened, str(text), limit, 0, status(), window, judging=True)
    measured = draw_texts(opened, str(text), TOKENS, 0, status(), window)
    check_apart(passage_hashes(measured), scored)
    perplexity, losses = bench.measure_losses(
        opened.source, scored, mean_keys(opened.source, measured, status()), tell=status()
    )
    tokens = sum(len(ids) // 2 for ids in scored)
    return {"tokens": tokens, "perplexity": perplexity, "formats": [loss.record() for loss in losses]}


def _done(figures: dict[str, Any]) -> None:
    """Report a cell as soon as it is measured."""
    say(f"{figures['cell']}: int4 {figures['tokens_per_s']['int4']:.1f} tokens/s, {figures['ratio']:.3f} of int8")
    status().advance(1)
