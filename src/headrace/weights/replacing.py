"""Files that are there when they are whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART = ".part"  # of a name: what is being written, or was when its writer was killed


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write under, which becomes `path` when all is written; an error leaves `path` as it was."""
    part = path.with_name(f"{path.name}{PART}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
