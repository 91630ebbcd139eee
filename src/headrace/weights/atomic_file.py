"""Atomic file writes, and a lock for the writer of a file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace import host

PART = ".part"  # suffix of an unfinished file


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, renamed to `path` at the end. An error leaves `path` unchanged."""
    part = path.with_name(f"{path.name}{PART}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of `path`, a file `.NAME.lock` in the same folder, so that one process at a time writes it.

    The lock belongs to the open file, so that the file of a killed process does not lock.
    Raises ValueError if another process holds the lock, and OSError.
    """
    name = path.with_name(f".{path.name}.lock")
    with name.open("a") as file:
        if not host.lock(file.fileno()) or not _is(name, file.fileno()):
            raise ValueError(f"{path} is being written by another command; wait until it is done, or give another name")
        try:
            yield
        finally:
            name.unlink(missing_ok=True)


def _is(name: Path, file: int) -> bool:
    """True if the open file still has this name: the previous holder deletes the file when it unlocks."""
    try:
        return os.path.samestat(os.fstat(file), name.stat())
    except FileNotFoundError:
        return False
