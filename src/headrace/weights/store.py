"""The store: models on this machine, under `$HEADRACE_HOME/models` (default `~/.cache/headrace/models`).

A model is a folder with its files and a record of them. It is filled under a hidden name, `.NAME.partial`, and renamed after
every file has been verified.

A file is checked against its SHA-256 or git id.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import filelock
import msgspec

from headrace import host
from headrace.data.progress import human_size
from headrace.weights.catalog import Entry

RECORD = ".headrace.json"
SPARE = 16 << 20  # bytes left free on the disk

_log = logging.getLogger(__name__)
CHUNK = 1 << 20
# Folder of a repository with its named chat templates.
TEMPLATES = "additional_chat_templates"
SEEN = "sha256.json"  # in the home folder: path -> [size, mtime in ns, SHA-256]
MOST = 512  # cached digests


class StoreError(ValueError):
    """The store cannot do the operation. The message is one line with the remedy."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a model: name (path below the model's folder), size in bytes, SHA-256."""

    name: str
    size: int
    sha256: str


class Record(msgspec.Struct, frozen=True):
    """A stored model. file: the one file to open; empty: the whole folder."""

    name: str  # catalog name, organisation/repository, or organisation/repository:file
    files: tuple[StoredFile, ...]
    file: str = ""
    source: str = ""
    commit: str = ""
    licence: str = "unknown"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


class Store:
    """The models under one folder. The folder is created when the first model is stored."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or home() / "models"

    def installed(self) -> list[Record]:
        """Every complete model, by name."""
        records = [self._load(path) for path in sorted(self.root.glob(f"*/{RECORD}")) if not path.parent.name.startswith(".")]
        return sorted((record for record in records if record), key=lambda record: record.name)

    def find(self, name: str) -> Record | None:
        """The record of a model; None if it is missing or incomplete (a file is missing or has another size)."""
        return self._load(self._folder(name) / RECORD)

    def path(self, record: Record) -> Path:
        """The model's file, or its folder."""
        return self._folder(record.name) / record.file

    def remove(self, name: str) -> int:
        """Delete a model and its unfinished pull; returns the bytes freed."""
        with self.lock(name):
            freed = self.bytes_of(name)
            shutil.rmtree(self._folder(name), ignore_errors=True)
            shutil.rmtree(self._staging(name), ignore_errors=True)
        return freed

    def bytes_of(self, name: str) -> int:
        """Bytes on disk that `remove` would free."""
        return folder_size(self._folder(name)) + folder_size(self._staging(name))

    def partials(self) -> dict[str, int]:
        """Folder name -> bytes of every unfinished pull."""
        return {path.name[1 : -len(".partial")]: folder_size(path) for path in sorted(self.root.glob(".*.partial"))}

    @contextmanager
    def lock(self, name: str, wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the lock of a model, so that one process at a time changes it. wait: called once if another process holds it."""
        path = self.root / ".locks" / f"{folder_name(name)}.lock"
        with _clear_errors(self.root):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(path)
            try:
                lock.acquire(blocking=False)
            except filelock.Timeout:
                wait()
                lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def staging(self, name: str) -> Iterator[Path]:
        """The hidden folder that a pull fills. After an error it stays for the next pull to resume, unless it is empty."""
        folder = self._staging(name)
        with _clear_errors(self.root):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            yield folder
        finally:
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()

    def commit(self, record: Record) -> None:
        """Give the staged folder its final name in one rename; files that are not in the record are deleted."""
        staging, folder = self._staging(record.name), self._folder(record.name)
        keep = {staging / file.name for file in record.files}
        for path in sorted(staging.rglob("*"), reverse=True):  # a folder comes after its files
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
            elif path.is_file() and path not in keep:
                path.unlink()
        (staging / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        old = self.root / f".{folder.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)  # a folder cannot be replaced by a rename
        staging.rename(folder)
        shutil.rmtree(old, ignore_errors=True)

    def _folder(self, name: str) -> Path:
        return self.root / folder_name(name)

    def _staging(self, name: str) -> Path:
        return self.root / f".{folder_name(name)}.partial"

    def _load(self, path: Path) -> Record | None:
        try:
            record = msgspec.json.decode(path.read_bytes(), type=Record)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("%s cannot be read (%s); pull the model again", path, error)
            return None
        for file in record.files:
            stored = path.parent / file.name
            if not stored.is_file() or stored.stat().st_size != file.size:
                _log.warning("%s is not whole (%s); pull the model again", record.name, file.name)
                return None
        return record


def installed() -> list[Record]:
    """The models in the user's store; none without a home directory."""
    return [] if find_home() is None else Store().installed()


def home() -> Path:
    """Folder of all data of Headrace: `$HEADRACE_HOME`, or `~/.cache/headrace`. Raises StoreError if there is none."""
    folder = find_home()
    if folder is None:
        raise StoreError("this user has no home directory; set HEADRACE_HOME to a folder of yours")
    return folder


def find_home() -> Path | None:
    """The same folder, or None if there is neither a home directory nor HEADRACE_HOME."""
    if folder := os.environ.get("HEADRACE_HOME"):
        return Path(folder)
    user = host.user_home()
    return None if user is None else user / ".cache" / "headrace"


def file_title(name: str) -> str:
    """A model's name by that of its file: `ggml-base.bin` is ggml-base."""
    return name.removesuffix(".gguf").removesuffix(".bin")


def expand(path: str) -> Path:
    """A path with `~` expanded. Raises StoreError if there is no home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise StoreError(f"{path}: this user has no home directory; give a path without ~") from None


def folder_name(name: str) -> str:
    """A model's name as a folder name. Catalog and repository names hold no "--", so names cannot collide.

    Raises StoreError for names that could leave the store or collide with its hidden folders.
    """
    folder = name.replace("/", "--").replace(":", "--")
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", folder):
        raise StoreError(f"{name!r} is not a valid name of a model")
    return folder


def folder_size(folder: Path) -> int:
    """Bytes of all files below a folder, or of a file."""
    if folder.is_file():
        return folder.stat().st_size
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def require_space(folder: Path, nbytes: int) -> None:
    """Raise StoreError unless the disk has `nbytes` bytes, and SPARE more, free."""
    free = shutil.disk_usage(folder).free
    if free < nbytes + SPARE:
        raise StoreError(_full(folder, f"{human_size(nbytes + SPARE)} needed, {human_size(free)} free"))


def _full(folder: Path, detail: str) -> str:
    return f"the disk of {folder} is full ({detail}): free some space, or set HEADRACE_HOME to a folder on another disk"


@contextmanager
def _clear_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise StoreError(f"cannot write to {root} ({reason}): set HEADRACE_HOME to a folder of yours") from None


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


def catalog_entry(path: Path, entries: Mapping[str, Entry]) -> Entry | None:
    """The catalog entry with the SHA-256 of this file, or None. The file is hashed only if some entry has its size."""
    if not path.is_file():
        return None
    size = path.stat().st_size
    alike = [entry for entry in entries.values() if entry.sha256 is not None and entry.size == size]
    if not alike:
        return None
    digest = cached_sha256(path)
    return next((entry for entry in alike if entry.sha256 == digest), None)


def cached_sha256(path: Path) -> str:
    """SHA-256 of a file, from the cache if its size and modification time are unchanged."""
    path = path.resolve()
    stat = path.stat()
    seen = _read_digests()
    size, changed, digest = seen.get(str(path), (0, 0, ""))
    if (size, changed) == (stat.st_size, stat.st_mtime_ns):
        return digest
    digest = sha256_of(path)
    seen.pop(str(path), None)
    seen[str(path)] = (stat.st_size, stat.st_mtime_ns, digest)
    _write_digests(dict(list(seen.items())[-MOST:]))
    return digest


def _read_digests() -> dict[str, tuple[int, int, str]]:
    """The cache: path -> (size, mtime in ns, SHA-256). Empty if the file is missing or invalid."""
    try:
        data = json.loads((home() / SEEN).read_text("utf-8"))
        return {str(path): (int(size), int(changed), str(digest)) for path, (size, changed, digest) in data.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_digests(seen: Mapping[str, tuple[int, int, str]]) -> None:
    with contextlib.suppress(OSError, StoreError):  # the cache only saves time
        home().mkdir(parents=True, exist_ok=True)
        draft = home() / f".{SEEN}.{os.getpid()}"
        draft.write_text(json.dumps(seen), "utf-8")
        draft.replace(home() / SEEN)
