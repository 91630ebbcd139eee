"""Callbacks of options that name an output. They fail before any work if it cannot be written."""

import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import typer


def writable(path: Path | None) -> Path | None:
    """Check a file to write. Creates nothing, so a killed command leaves no empty file. Raises typer.BadParameter."""
    if path is not None and writable_output(path) is not None and path.exists() and not path.is_file():
        raise typer.BadParameter(f"{path} is not a file; name a file")
    return path


def writable_output(path: Path | None) -> Path | None:
    """Check a file or a folder to write, which may exist. Raises typer.BadParameter."""
    if path is None:
        return None
    folder = path.absolute().parent
    if not folder.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist; create it first")
    try:
        if path.is_file():
            os.close(os.open(path, os.O_WRONLY))
        elif not path.exists():
            with TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written ({error.strerror}); give another name") from None
    return path


def writable_folder(path: Path | None) -> Path | None:
    """Check a folder to write into, which may be missing. Raises typer.BadParameter."""
    if path is None:
        return None
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written into ({error.strerror}); name another folder") from None
    finally:
        for folder in new:
            with suppress(OSError):
                folder.rmdir()
    return path
