"""Command perplexity: how well a model predicts a text."""

import math
import time
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.help import short_help
from headrace.cli.inputs import read_text
from headrace.cli.opening import open_llm
from headrace.cli.options import ModelName, WeightOptions, with_groups
from headrace.cli.output import json_text, print_fields, say, status
from headrace.data.progress import counted
from headrace.stats.paired_ratio import tokens_for_error

# Relative errors of a perplexity: above WIDE the command warns, and advises as many tokens as give NARROW.
WIDE, NARROW = 0.05, 0.02


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "window stride limit as_json kv_dtype quantize",
        (
            "headrace perplexity MODEL text.txt --limit 4096",
            "Perplexity of the first 4,096 tokens, with its standard error.",
        ),
    )
    app.command(cls=short)(with_groups(perplexity))


def perplexity(
    model: ModelName,
    options: WeightOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Text file.")],
    window: Annotated[int | None, typer.Option(min=2, help="Tokens of a window (default: 512, at most the context).")] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from one window to the next (default: a window; half a window scores every token)."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Use only this many tokens from the start of the text.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure how well a model predicts a text: exp of the mean negative log-likelihood of its tokens.

    The text is cut into independent windows. Only the second half of each window is scored, so every scored token follows at
    least half a window of text. Perplexities are comparable only between models with the same tokenizer, on the same text and
    windows.
    """
    from headrace.stats import paired_ratio as statistics
    from headrace.workflows.perplexity import BATCH, DEFAULT_WINDOW, score, text_windows

    options.check()
    text = read_text(file)
    llm = open_llm(model, options, max_num_seqs=BATCH, preset="online", enable_prefix_caching=False)
    longest = llm.memory_plan.max_model_len
    window = window or min(DEFAULT_WINDOW, longest)
    if window > longest:
        raise ValueError(f"the model's context holds windows of {longest} tokens; use --window {longest} or less")
    windows = text_windows(llm, text, window, stride or window, limit)
    start = time.perf_counter()
    status().start("perplexity", len(windows), unit="windows")
    logprobs = score(llm, windows, status().advance)
    status().finish()
    seconds = time.perf_counter() - start
    value, error = statistics.perplexity(logprobs)
    if warning := _warning(len(logprobs), value, error):
        say(warning)
    report = {
        "model": model,
        "file": str(file),
        "perplexity": value,
        "error": error,
        "tokens": len(logprobs),
        "windows": len(windows),
        "window": window,
        "stride": stride or window,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(sum(len(window.tokens) for window in windows) / seconds, 2),
    }
    if as_json:
        print(json_text(report, indent=2))
        return
    print_fields(
        [
            ("perplexity", f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else "")),
            ("tokens", f"{len(logprobs):,} scored in {counted(len(windows), 'windows')} of {window}, {report['stride']} apart"),
            ("speed", f"{report['tokens_per_s']:.1f} tokens/s"),
        ]
    )


def _warning(count: int, value: float, error: float | None) -> str:
    """Return the advice to score more tokens if the relative error is above WIDE, otherwise an empty text."""
    if error is None or math.isinf(value):
        return ""
    share = error / value
    if share <= WIDE:
        return ""
    enough = tokens_for_error(count, share, NARROW)
    few = f"{counted(count, 'tokens')} scored are too few: ± {share:.0%} is too wide to compare models by"
    return f"{few}; with about {enough:,} it is ± {NARROW:.0%}"
