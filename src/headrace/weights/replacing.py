"""Files that are there when they are whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace import host

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


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Only one process at a time writes `path`. Raises ValueError where another one does now, and OSError. What says so lies
    beside it, and goes with who wrote it; left by one that was killed it says nothing."""
    name = path.with_name(f".{path.name}.lock")
    with name.open("a") as file:
        if not host.lock(file.fileno()) or not _is(name, file.fileno()):
            raise ValueError(f"{path} is being written by another command; wait until it is done, or give another name")
        try:
            yield
        finally:
            name.unlink(missing_ok=True)


def _is(name: Path, file: int) -> bool:
    """Whether an open file still has this name: who had the lock before takes it away."""
    try:
        return os.path.samestat(os.fstat(file), name.stat())
    except FileNotFoundError:
        return False
