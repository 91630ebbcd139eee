"""Identify a model file by its SHA-256, with a cache of digests so that no unchanged file is hashed twice."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from headrace.weights.catalog import Entry
from headrace.weights.store import StoreError, home

SEEN = "sha256.json"  # in the home folder: path -> [size, mtime in ns, SHA-256]
MOST = 512  # cached digests


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
    seen = _read()
    size, changed, digest = seen.get(str(path), (0, 0, ""))
    if (size, changed) == (stat.st_size, stat.st_mtime_ns):
        return digest
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    seen.pop(str(path), None)
    seen[str(path)] = (stat.st_size, stat.st_mtime_ns, digest)
    _write(dict(list(seen.items())[-MOST:]))
    return digest


def _read() -> dict[str, tuple[int, int, str]]:
    """The cache: path -> (size, mtime in ns, SHA-256). Empty if the file is missing or invalid."""
    try:
        data = json.loads((home() / SEEN).read_text("utf-8"))
        return {str(path): (int(size), int(changed), str(digest)) for path, (size, changed, digest) in data.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(seen: Mapping[str, tuple[int, int, str]]) -> None:
    with contextlib.suppress(OSError, StoreError):  # the cache only saves time
        home().mkdir(parents=True, exist_ok=True)
        draft = home() / f".{SEEN}.{os.getpid()}"
        draft.write_text(json.dumps(seen), "utf-8")
        draft.replace(home() / SEEN)
