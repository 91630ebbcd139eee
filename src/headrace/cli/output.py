"""Output of commands: results on stdout, everything else on stderr; tables on a terminal, tab-separated lines elsewhere.

The progress line stands on stderr from a command's start to its first output. CJK characters and most emoji take two cells.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from rich.cells import cell_len, chop_cells, set_cell_size

from headrace.data.progress import Moving, Progress, for_stream

STARTING = "starting"
# Commands that take long to start.
LONG = {
    *(
        "run",
        "chat",
        "ask",
        "generate",
        "embed",
        "rank",
        "rerank",
        "classify",
        "serve",
        "perplexity",
        "arithmetic",
        "compare",
        "compress",
    ),
    *("translate", "transcribe", "distil", "train-heads", "train-classifier", "bench"),
}
QUIET = {"-q", "--quiet", "-h", "--help", "--help-all"}
# Shortest prompt, in tokens, whose prefill shows its progress.
SHOWN_PROMPT = 512
ELLIPSIS = "…"


def say(line: str) -> None:
    """Print a line on stderr."""
    status().note(printable(line))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. On a terminal the last column wraps; elsewhere cells are separated by tabs."""
    status().finish()
    table = [[printable(cell) for cell in row] for row in (columns, *rows)]
    if not sys.stdout.isatty():
        for cells in table:
            print("\t".join(cells))
        return
    widths = [max(width(cells[i]) for cells in table) for i in range(len(columns) - 1)]
    room = max(shutil.get_terminal_size().columns - sum(size + 2 for size in widths), 16)
    for cells in table:
        padded = [cell + " " * (size - width(cell)) for cell, size in zip(cells[:-1], widths, strict=True)]
        first, *more = wrapped(cells[-1], room)
        print("  ".join([*padded, first]))
        for line in more:
            print(" " * sum(size + 2 for size in widths) + line)


def json_text(value: Any, indent: int | None = None) -> str:
    """Return JSON for stdout, with ASCII escapes unless stdout is UTF-8: its fallback for other characters is not JSON."""
    utf8 = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "").replace("_", "") == "utf8"
    return json.dumps(value, ensure_ascii=not utf8, indent=indent)


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print one pair of name and value a line."""
    status().finish()
    for name, value in fields:
        print(f"{name + ':':<16} {printable(value)}")


def printable(text: str, keep: str = "") -> str:
    """Escape non-printable characters of an untrusted text, which could control a terminal. keep: characters to allow."""
    return "".join(char if char.isprintable() or char in keep else f"\\x{ord(char):02x}" for char in text)


@cache
def status() -> Progress:
    """Return the progress display of the process."""
    return for_stream()


def begin(arguments: Sequence[str]) -> None:
    """Show "starting" on a terminal at once, before the slow imports."""
    status.cache_clear()
    if arguments and arguments[0] in LONG and not QUIET & set(arguments) and isinstance(status(), Moving):
        status().start(STARTING)


def moving(quiet: bool = False) -> Progress:
    """Return the progress bar on a terminal, otherwise, or with `quiet`, a silent one."""
    return status() if isinstance(status(), Moving) and not quiet else Progress()


def watch_prompt(llm: Any, outputs: Sequence[Any], progress: Progress, cancelled: Callable[[], bool]) -> Callable[[], bool]:
    """Wrap `cancelled` for LLM.stream, which calls it between steps, to show the prefill of a long prompt."""
    seen = 0

    def check() -> bool:
        nonlocal seen
        if outputs and seen >= 0:
            total, now = len(outputs[0].prompt_token_ids), llm.engine.tokens_read(outputs[0].request_id)
            if now >= total or total < SHOWN_PROMPT:
                seen = -1
            elif now > seen:
                if seen == 0:
                    progress.start("reading the prompt", total, now, unit="tokens")
                else:
                    progress.advance(now - seen)
                seen = now
        return cancelled()

    return check


def width(text: str) -> int:
    """Terminal cells of a one-line text."""
    return cell_len(text)


def crop(text: str, cells: int) -> str:
    """Cut a one-line text to at most `cells` cells; a cut text ends in …"""
    if cell_len(text) <= cells:
        return text
    if cells <= 0:
        return ""
    return set_cell_size(text, cells - 1).rstrip(" ") + ELLIPSIS


def wrapped(text: str, cells: int) -> list[str]:
    """Break a one-line text into lines of at most `cells` (≥ 2) cells, between words, or inside longer words."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if width(joined) <= cells:
            lines[-1] = joined
            continue
        pieces = chop_cells(word, cells)
        lines = [*(lines if lines[-1] else lines[:-1]), *pieces]
    return lines
