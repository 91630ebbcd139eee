"""perplexity: how well a model predicts a text."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import short_help
from headrace.cli.inputs import read_text
from headrace.cli.opening import open_llm
from headrace.cli.options import ModelName, WeightOptions, with_groups
from headrace.cli.output import json_text, print_fields, say
from headrace.cli.status import status
from headrace.data.progress import counted
from headrace.stats.perplexity import perplexity as perplexity_of
from headrace.stats.perplexity import tokens_for_error

WINDOW = 512
WIDE, NARROW = 0.05, 0.02  # an error's share of the perplexity: from where a person is warned, and what is advised
BATCH = 4  # windows in one call: few enough that Ctrl-C and the count of windows come soon


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "window stride limit as_json kv_dtype quantize",
        (
            "headrace perplexity MODEL text.txt --limit 4096",
            "Of the first 4,096 tokens of a text, with its error.",
        ),
    )
    app.command(cls=short)(with_groups(perplexity))


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens fed together; the last `scored` of them count."""

    tokens: list[int]
    scored: int


def perplexity(
    model: ModelName,
    options: WeightOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A text.")],
    window: Annotated[int | None, typer.Option(min=2, help="Tokens fed at once (default: 512, or the context).")] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens from one window to the next (default: a window; half of one scores every token)."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Only the first tokens of the text.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Measure how well a model predicts a text: exp of the mean negative log-likelihood of its tokens.

    The text is cut into windows, which know nothing of each other. In each the second half is scored, so every scored token
    follows at least half a window of text. Perplexities compare only between models with the same tokenizer, on the same
    text and windows.
    """
    options.check()
    text = read_text(file)
    llm = open_llm(model, options, max_num_seqs=BATCH, preset="online", enable_prefix_caching=False)
    most = llm.memory_plan.max_model_len
    window = window or min(WINDOW, most)
    if window > most:
        raise ValueError(f"the model's context holds windows of {most} tokens; use --window {most} or less")
    tokens = llm.tokenizer.encode(text, add_special=False, parse_special=False)[:limit]  # as LLM.score reads a text
    windows = list(cut(tokens, beginning(llm.tokenizer), window, stride or window))
    start = time.perf_counter()
    scores = _score(llm, windows)
    seconds = time.perf_counter() - start
    value, error = perplexity_of(scores)
    if warning := _warning(len(scores), value, error):
        say(warning)
    found = {
        "model": model,
        "file": str(file),
        "perplexity": value,
        "error": error,
        "tokens": len(scores),
        "windows": len(windows),
        "window": window,
        "stride": stride or window,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(sum(len(one.tokens) for one in windows) / seconds, 2),
    }
    if as_json:
        print(json_text(found, indent=2))
        return
    print_fields(
        [
            ("perplexity", f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else "")),
            ("tokens", f"{len(scores):,} scored in {counted(len(windows), 'windows')} of {window}, {found['stride']} apart"),
            ("speed", f"{found['tokens_per_s']:.1f} tokens/s"),
        ]
    )


def cut(tokens: Sequence[int], start: list[int], size: int, stride: int) -> Iterator[Window]:
    """Windows of `size` tokens, each beginning with `start` (BOS, or nothing); a shorter rest counts only where it is all.

    A window scores its second half, or its last `stride` tokens where that is less, so that no token is scored twice.
    Raises ValueError for a text with nothing to score.
    """
    room = size - len(start)
    if len(tokens) + len(start) < 2:
        raise ValueError("the text has too few tokens to score; give a longer one")
    for at in range(0, max(len(tokens) - room, 0) + 1, stride):
        fed = [*start, *tokens[at : at + room]]
        yield Window(fed, max(min(len(fed) // 2, stride), 1))


def beginning(tokenizer: Any) -> list[int]:
    """What every text begins with for this model: BOS or nothing."""
    return [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_id]


def _score(llm: Any, windows: list[Window]) -> list[float]:
    """Log-probabilities of the tokens that count."""
    scores: list[float] = []
    status().start("perplexity", len(windows), unit="windows")
    for at in range(0, len(windows), BATCH):
        some = windows[at : at + BATCH]
        for one, score in zip(some, llm.score([one.tokens for one in some]), strict=True):
            scores += score.logprobs[-one.scored :]
        status().advance(len(some))
    status().finish()
    return scores


def _warning(count: int, value: float, error: float | None) -> str:
    """What to do about a wide error; empty where it is not. It falls with the root of the tokens."""
    if error is None or math.isinf(value):
        return ""
    share = error / value
    if share <= WIDE:
        return ""
    enough = tokens_for_error(count, share, NARROW)
    few = f"{counted(count, 'tokens')} scored are few: ± {share:.0%} is too wide to compare models by"
    return f"{few}; with about {enough:,} it is ± {NARROW:.0%}"
