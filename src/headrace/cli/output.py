"""Output of commands: results on stdout, everything else on stderr; tables on a terminal, tab-separated lines elsewhere."""

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.cli.status import status
from headrace.text.terminal_width import width, wrapped


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
