"""A file on its way here: what is known of it, and whether what came is what was promised."""

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from headrace.weights.store import StoredFile

CHUNK = 1 << 20


class FetchError(Exception):
    """A source could not deliver; one line that says why. The next source is tried."""


@dataclass(frozen=True)
class HubFile:
    """A file of the hub as the hub describes it. `sha256` or `blob` (the git id of a small file) checks it."""

    repo: str
    path: str
    revision: str
    size: int | None
    sha256: str | None
    blob: str | None

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def check(path: Path, sha256: str | None, blob: str | None) -> StoredFile | None:
    """The file with its SHA-256, or None where it is not what was asked for: by SHA-256, else by its git id."""
    size, found = path.stat().st_size, sha256_of(path)
    if sha256 is None and blob is not None:
        git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        with path.open("rb") as data:
            while chunk := data.read(CHUNK):
                git.update(chunk)
        right = git.hexdigest() == blob
    else:
        right = sha256 in (None, found)
    return StoredFile(path.name, size, found) if right else None


def one_line(error: object) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
