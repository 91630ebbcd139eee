"""Files and folders that a command is to write, looked at before any work."""

import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import typer


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


def writable_folder(path: Path | None) -> Path | None:
    """The same of a folder that is to be written into, and may have to be made."""
    if path is None:
        return None
    new = [one for one in (path, *path.parents) if not one.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written into ({error.strerror}); name another folder") from None
    finally:
        for one in new:
            with suppress(OSError):
                one.rmdir()
    return path
