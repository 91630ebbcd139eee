"""Downloads: a hub file's description, and the check of a downloaded file against its SHA-256 or git id."""

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from headrace.weights.store import StoredFile

CHUNK = 1 << 20
# Folder of a repository with its named chat templates.
TEMPLATES = "additional_chat_templates"


class FetchError(Exception):
    """A source failed; the message is one line with the reason. The caller tries the next source."""


@dataclass(frozen=True)
class HubFile:
    """A file of a hub repository. `size` is in bytes; `sha256`, or for a small file its git `blob` id, verifies a download."""

    repo: str
    path: str
    revision: str
    size: int | None
    sha256: str | None
    blob: str | None

    @property
    def name(self) -> str:
        """Name of the stored file: without folders, except that of named chat templates."""
        path = PurePosixPath(self.path)
        return self.path if str(path.parent) == TEMPLATES else path.name


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def verify_file(path: Path, sha256: str | None, blob: str | None) -> StoredFile | None:
    """Check a file against `sha256`, or if that is None against its git id `blob`; None if it does not match."""
    size, digest = path.stat().st_size, sha256_of(path)
    if sha256 is None and blob is not None:
        git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        with path.open("rb") as data:
            while chunk := data.read(CHUNK):
                git.update(chunk)
        right = git.hexdigest() == blob
    else:
        right = sha256 in (None, digest)
    return StoredFile(path.name, size, digest) if right else None


def one_line(error: object) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
