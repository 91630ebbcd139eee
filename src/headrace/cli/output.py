"""How commands print: answers on stdout, everything else on stderr; tables for people, tab-separated lines for programs."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def say(line: str) -> None:
    """A line about what happens, on stderr."""
    print(printable(line), file=sys.stderr, flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Rows of text. Where stdout is no terminal: tab-separated, nothing cut off."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            print("\t".join(printable(cell) for cell in row))
        return
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Name and value, one pair a line."""
    for name, value in fields:
        print(f"{name + ':':<16} {printable(value)}")


def printable(text: str, keep: str = "") -> str:
    """Text from a file that is not trusted, without what could steer a terminal. `keep`: characters to let through."""
    return "".join(char if char.isprintable() or char in keep else f"\\x{ord(char):02x}" for char in text)
