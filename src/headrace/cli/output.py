"""How commands print: answers on stdout, everything else on stderr; tables for people, tab-separated lines for programs."""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer
from rich.cells import cell_len, set_cell_size


def say(line: str) -> None:
    """A line about what happens, on stderr."""
    print(printable(line), file=sys.stderr, flush=True)


def writable(path: Path | None) -> Path | None:
    """A file that is to be written, as a callback of its option: before any work. Raises typer.BadParameter."""
    if path is None:
        return None
    folder = path.absolute().parent
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}; make it first")
    if path.exists() and not path.is_file():
        raise typer.BadParameter(f"{path} is no file; name one")
    new = not path.exists()
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666))
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written ({error.strerror}); name another file") from None
    if new:
        path.unlink()
    return path


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Rows of text; on a terminal the last column is cut to fit. Elsewhere tab-separated, nothing cut off."""
    table = [[printable(cell) for cell in row] for row in (columns, *rows)]
    if not sys.stdout.isatty():
        for cells in table:
            print("\t".join(cells))
        return
    widths = [max(cell_len(cells[i]) for cells in table) for i in range(len(columns) - 1)]
    room = max(shutil.get_terminal_size().columns - sum(width + 2 for width in widths), 16)
    for cells in table:
        last = cells[-1] if cell_len(cells[-1]) <= room else set_cell_size(cells[-1], room - 1) + "…"
        print("  ".join([*map(set_cell_size, cells, widths), last]))


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Name and value, one pair a line."""
    for name, value in fields:
        print(f"{name + ':':<16} {printable(value)}")


def printable(text: str, keep: str = "") -> str:
    """Text from a file that is not trusted, without what could steer a terminal. `keep`: characters to let through."""
    return "".join(char if char.isprintable() or char in keep else f"\\x{ord(char):02x}" for char in text)
