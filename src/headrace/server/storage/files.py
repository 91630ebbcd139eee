"""/v1/files: input and output of batches. An expired file is hidden at once and deleted by the next `delete_expired`.

An uploaded file is stored in chunks as they arrive. A file written by a batch is a name for rows of the batch.
"""

import sqlite3
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.server.access.principals import PRINCIPAL, Principal
from headrace.server.http.api_error import ApiError, bad
from headrace.server.protocols.openai_types import new_id, now
from headrace.server.settings import Limits
from headrace.server.storage.store import Store, listing
from headrace.server.storage.store_schema import PIECE_BYTES

# Purposes of uploads. The server itself reads only those of batches.
PURPOSES = ("batch", "user_data", "assistants", "evals", "fine-tune", "vision")
# Shortest and longest lifetime that a client may set.
LIFETIME_SECONDS = (3600, 2592000)
# Lifetime of a batch's input if the upload sets none.
INPUT_SECONDS = LIFETIME_SECONDS[1]
# An upload that is not complete by then never will be.
UPLOAD_SECONDS = 3600
# Database pages that one transaction returns to the disk.
PAGES_AT_ONCE = 1024
COLUMNS = "number, id, created, filename, purpose, bytes, expires, batch, state, owner"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A row of table `files`. With a `batch`, the content is the batch's rows in `state`."""

    number: int
    id: str
    created: int
    filename: str
    purpose: str
    bytes: int
    expires: int | None
    batch: int | None
    state: str | None
    owner: str

    def object(self) -> dict[str, Any]:
        """The file object of the protocol."""
        return {
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created, "expires_at": self.expires,
            "filename": self.filename, "purpose": self.purpose, "status": "processed",
        }  # fmt: skip


def lifetime(policy: dict[str, Any] | None, name: str) -> int | None:
    """Seconds from creation to expiry in a policy of the field `name`; None: no expiry. Raises ApiError if it is invalid."""
    if policy is None:
        return None
    seconds = policy.get("seconds")
    if set(policy) != {"anchor", "seconds"} or policy["anchor"] != "created_at" or type(seconds) is not int:
        raise bad(f"{name} has the anchor created_at, and seconds", name)
    if not LIFETIME_SECONDS[0] <= seconds <= LIFETIME_SECONDS[1]:
        raise bad(f"{name}: seconds must be {LIFETIME_SECONDS[0]} to {LIFETIME_SECONDS[1]}, not {seconds}", name)
    return seconds


def create(db: sqlite3.Connection, limits: Limits, who: Principal) -> int:
    """Insert an empty file, hidden until it is complete. Returns its number. Raises ApiError if there is no room."""
    delete_expired(db)
    count = "SELECT count(*), coalesce(sum(owner = ?), 0) FROM files WHERE batch IS NULL"
    if who.room(limits.files, *db.execute(count, (who.name,)).fetchone()) < 1:
        raise ApiError(400, f"the server keeps {limits.files} files and is full; delete some", code="storage_full")
    row = (new_id("file"), now(), "", "", 0, 0, who.name)
    query = "INSERT INTO files (id, created, filename, purpose, bytes, complete, owner) VALUES (?, ?, ?, ?, ?, ?, ?)"
    return int(db.execute(query, row).lastrowid or 0)


def append(db: sqlite3.Connection, file: int, piece: bytes, most: int, who: Principal) -> None:
    """Add a chunk. Raises ApiError if it does not fit into the `most` bytes of all uploads, or the share of `who`."""
    held = "SELECT coalesce(sum(bytes), 0), coalesce(sum(bytes) FILTER (WHERE owner = ?), 0) FROM files WHERE batch IS NULL"
    if who.room(most, *db.execute(held, (who.name,)).fetchone()) < len(piece):
        raise ApiError(400, f"the server keeps {most} bytes of files and is full; delete some", code="storage_full")
    db.execute("INSERT INTO chunks (file, content) VALUES (?, ?)", (file, piece))
    db.execute("UPDATE files SET bytes = bytes + ? WHERE number = ?", (len(piece), file))


def complete(db: sqlite3.Connection, file: int, name: str, purpose: str, lifetime: int | None) -> dict[str, Any]:
    """Make an uploaded file visible. `lifetime`: seconds until it expires; None: never."""
    query = "UPDATE files SET filename = ?, purpose = ?, expires = created + ?, complete = 1 WHERE number = ?"
    db.execute(query, (name, purpose, lifetime, file))
    (row,) = _select(db, "number = ?", file)
    return row.object()


def discard(db: sqlite3.Connection, file: int) -> None:
    """Delete a file that will not be completed."""
    for describe in _select(db, "number = ?", file):
        _drop(db, describe)


def add_batch_file(
    db: sqlite3.Connection, name: str, size: int, lifetime: int | None, batch: int, state: str, owner: str
) -> str:
    """Insert a file whose content is the batch's rows in `state`. Returns its id."""
    created = now()
    expires = None if lifetime is None else created + lifetime
    query = f"INSERT INTO files (complete, {COLUMNS}) VALUES (1, NULL, ?, ?, ?, 'batch_output', ?, ?, ?, ?, ?)"
    file = new_id("file")
    db.execute(query, (file, created, name, size, expires, batch, state, owner))
    return file


def delete_expired(db: sqlite3.Connection) -> None:
    """Delete expired files, and the parts of uploads that were never completed."""
    for file in _select(db, "expires <= ? OR NOT complete AND created <= ?", now(), now() - UPLOAD_SECONDS):
        _drop(db, file)


def release_pages(db: sqlite3.Connection) -> bool:
    """Return some free pages of the database to the disk. Returns whether there are more."""
    db.execute(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})").fetchall()
    (free,) = db.execute("PRAGMA freelist_count").fetchone()
    (kind,) = db.execute("PRAGMA auto_vacuum").fetchone()
    return bool(free and kind)


async def list_files(store: Store, purpose: str | None, after: str | None, limit: int, order: str) -> dict[str, Any]:
    beyond, direction = (">", "ASC") if order == "asc" else ("<", "DESC")
    query = (
        f"SELECT {COLUMNS} FROM files WHERE owner = :owner AND complete AND (expires IS NULL OR expires > :now) "
        "AND (:purpose IS NULL OR purpose = :purpose) AND (:after IS NULL OR number "
        f"{beyond} (SELECT number FROM files WHERE id = :after AND owner = :owner)) ORDER BY number {direction} LIMIT :most"
    )
    given = {"owner": PRINCIPAL.get().name, "now": now(), "purpose": purpose, "after": after, "most": limit + 1}
    rows = await store.read(lambda db: db.execute(query, given).fetchall())
    return listing([StoredFile(*row).object() for row in rows], None, limit)


async def describe(store: Store, name: str) -> dict[str, Any]:
    owner = PRINCIPAL.get().name
    return (await store.read(lambda db: find(db, name, owner))).object()


async def content(store: Store, name: str) -> tuple[int, AsyncIterator[bytes]]:
    """The size of a file in bytes, and its content piece by piece. Raises ApiError."""
    owner = PRINCIPAL.get().name
    file = await store.read(lambda db: find(db, name, owner))
    return file.bytes, _content(store, file)


async def _content(store: Store, file: StoredFile) -> AsyncIterator[bytes]:
    at = 0
    while (piece := await store.read(partial(read_piece, file=file, after=at))) is not None:
        at, data = piece
        yield data


async def delete(store: Store, name: str) -> dict[str, Any]:
    owner = PRINCIPAL.get().name
    await store.run(lambda db: _drop(db, find(db, name, owner)))
    return {"id": name, "object": "file", "deleted": True}


def find(db: sqlite3.Connection, name: str, owner: str, param: str | None = None) -> StoredFile:
    """Raises ApiError (404) if the owner has no such file. `param`: the request field that names it."""
    for file in _select(db, "complete AND id = ? AND owner = ?", name, owner):
        if file.expires is None or file.expires > now():
            return file
    raise ApiError(404, f"there is no file {name[:100]!r}", param=param, code="file_not_found")


def lines(db: sqlite3.Connection, file: StoredFile, longest: int) -> Iterator[bytes]:
    """The lines of a file. A line longer than `longest` bytes is cut to one byte more, so that it is still too long."""
    at, rest = 0, b""
    while (piece := read_piece(db, file, at)) is not None:
        at, data = piece
        *whole, rest = (rest + data).split(b"\n")
        yield from whole
        if len(rest) > longest:
            rest = rest[: longest + 1]
    yield rest


def read_piece(db: sqlite3.Connection, file: StoredFile, after: int) -> tuple[int, bytes] | None:
    """The next piece of a file: the number of its last row, and its bytes. None at the end. `after`: the last row so far."""
    if file.batch is None:
        rows = db.execute("SELECT number, content FROM chunks WHERE file = ? AND number > ? LIMIT 1", (file.number, after))
    else:
        query = "SELECT number, answer FROM rows WHERE batch = ? AND state = ? AND number > ? ORDER BY number"
        rows = db.execute(query, (file.batch, file.state, after))
    content = bytearray()
    for number, part in rows:
        after = number
        content += part if file.batch is None else part + b"\n"
        if len(content) >= PIECE_BYTES:
            break
    return (after, bytes(content)) if content else None


def _select(db: sqlite3.Connection, where: str, *given: Any) -> list[StoredFile]:
    return [StoredFile(*row) for row in db.execute(f"SELECT {COLUMNS} FROM files WHERE {where}", given)]


def _drop(db: sqlite3.Connection, file: StoredFile) -> None:
    """Delete a file and its content."""
    db.execute("DELETE FROM files WHERE number = ?", (file.number,))
    if file.batch is None:
        db.execute("DELETE FROM chunks WHERE file = ?", (file.number,))
        return
    db.execute("DELETE FROM rows WHERE batch = ? AND state = ?", (file.batch, file.state))
    (others,) = db.execute("SELECT count(*) FROM files WHERE batch = ?", (file.batch,)).fetchone()
    db.execute("UPDATE batches SET bytes = iif(?, bytes - ?, 0) WHERE number = ?", (others, file.bytes, file.batch))
