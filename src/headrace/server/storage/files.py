"""/v1/files: what batches read and write. A file past its time is not there any more, and is deleted at the next `sweep`.

What a client sends is kept in pieces as it comes. What a batch writes is its rows: such a file is a name for them.
"""

import sqlite3
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.server.access.principals import PRINCIPAL, Principal
from headrace.server.http.api_error import ApiError, bad
from headrace.server.http.ids import new_id, now
from headrace.server.settings import Limits
from headrace.server.storage.store import Store, listing
from headrace.server.storage.store_schema import PIECE

PURPOSES = ("batch", "user_data", "assistants", "evals", "fine-tune", "vision")  # of uploads; only batches are read here
SECONDS = (3600, 2592000)  # of a file's life
INPUT_SECONDS = SECONDS[1]  # of a batch's input, where the upload names none
UPLOAD_SECONDS = 3600  # in which an upload has come, or will not
PAGES = 1024  # of the database that are given back to the disk in one transaction
COLUMNS = "number, id, created, filename, purpose, bytes, expires, batch, state, owner"


@dataclass(frozen=True, slots=True)
class File:
    """A row of `files`; with a `batch`, its rows in that state are the content."""

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
        """As the protocol has it."""
        return {
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created, "expires_at": self.expires,
            "filename": self.filename, "purpose": self.purpose, "status": "processed",
        }  # fmt: skip


def life(policy: dict[str, Any] | None, name: str) -> int | None:
    """Seconds that a file is kept after it was made, None for ever. Raises ApiError for a policy that is none."""
    if policy is None:
        return None
    seconds = policy.get("seconds")
    if set(policy) != {"anchor", "seconds"} or policy["anchor"] != "created_at" or type(seconds) is not int:
        raise bad(f"{name} has the anchor created_at, and seconds", name)
    if not SECONDS[0] <= seconds <= SECONDS[1]:
        raise bad(f"{name}: seconds must be {SECONDS[0]} to {SECONDS[1]}, not {seconds}", name)
    return seconds


def begin(db: sqlite3.Connection, limits: Limits, who: Principal) -> int:
    """A file that nobody sees before it is complete; returns its number. Raises ApiError."""
    sweep(db)
    count = "SELECT count(*), coalesce(sum(owner = ?), 0) FROM files WHERE batch IS NULL"
    if who.room(limits.files, *db.execute(count, (who.name,)).fetchone()) < 1:
        raise ApiError(400, f"the server keeps {limits.files} files and is full; delete some", code="storage_full")
    row = (new_id("file"), now(), "", "", 0, 0, who.name)
    query = "INSERT INTO files (id, created, filename, purpose, bytes, complete, owner) VALUES (?, ?, ?, ?, ?, ?, ?)"
    return int(db.execute(query, row).lastrowid or 0)


def append(db: sqlite3.Connection, file: int, piece: bytes, most: int, who: Principal) -> None:
    """More of it. Raises ApiError where all uploads together may have `most` bytes and do."""
    held = "SELECT coalesce(sum(bytes), 0), coalesce(sum(bytes) FILTER (WHERE owner = ?), 0) FROM files WHERE batch IS NULL"
    if who.room(most, *db.execute(held, (who.name,)).fetchone()) < len(piece):
        raise ApiError(400, f"the server keeps {most} bytes of files and is full; delete some", code="storage_full")
    db.execute("INSERT INTO chunks (file, content) VALUES (?, ?)", (file, piece))
    db.execute("UPDATE files SET bytes = bytes + ? WHERE number = ?", (len(piece), file))


def complete(db: sqlite3.Connection, file: int, name: str, purpose: str, life: int | None) -> dict[str, Any]:
    """All of it is there; it is kept for `life` seconds, None for ever."""
    query = "UPDATE files SET filename = ?, purpose = ?, expires = created + ?, complete = 1 WHERE number = ?"
    db.execute(query, (name, purpose, life, file))
    (row,) = _select(db, "number = ?", file)
    return row.object()


def abandon(db: sqlite3.Connection, file: int) -> None:
    """Nothing more will come of it."""
    for one in _select(db, "number = ?", file):
        _drop(db, one)


def of_rows(db: sqlite3.Connection, name: str, size: int, life: int | None, batch: int, state: str, owner: str) -> str:
    """The rows of a batch that ended in this state, as a file of the batch's owner; returns its id."""
    created = now()
    expires = None if life is None else created + life
    query = f"INSERT INTO files (complete, {COLUMNS}) VALUES (1, NULL, ?, ?, ?, 'batch_output', ?, ?, ?, ?, ?)"
    made = new_id("file")
    db.execute(query, (made, created, name, size, expires, batch, state, owner))
    return made


def sweep(db: sqlite3.Connection) -> None:
    """Delete the files whose time is over, and what has come of uploads under which the server ended."""
    for file in _select(db, "expires <= ? OR NOT complete AND created <= ?", now(), now() - UPLOAD_SECONDS):
        _drop(db, file)


def shrink(db: sqlite3.Connection) -> bool:
    """Give some of what deleted rows had back to the disk; whether there is more."""
    db.execute(f"PRAGMA incremental_vacuum({PAGES})").fetchall()
    (free,) = db.execute("PRAGMA freelist_count").fetchone()
    (kind,) = db.execute("PRAGMA auto_vacuum").fetchone()
    return bool(free and kind)


async def listed(store: Store, purpose: str | None, after: str | None, limit: int, order: str) -> dict[str, Any]:
    beyond, direction = (">", "ASC") if order == "asc" else ("<", "DESC")
    query = (
        f"SELECT {COLUMNS} FROM files WHERE owner = :owner AND complete AND (expires IS NULL OR expires > :now) "
        "AND (:purpose IS NULL OR purpose = :purpose) AND (:after IS NULL OR number "
        f"{beyond} (SELECT number FROM files WHERE id = :after AND owner = :owner)) ORDER BY number {direction} LIMIT :most"
    )
    given = {"owner": PRINCIPAL.get().name, "now": now(), "purpose": purpose, "after": after, "most": limit + 1}
    rows = await store.read(lambda db: db.execute(query, given).fetchall())
    return listing([File(*row).object() for row in rows], None, limit)


async def one(store: Store, name: str) -> dict[str, Any]:
    owner = PRINCIPAL.get().name
    return (await store.read(lambda db: find(db, name, owner))).object()


async def content(store: Store, name: str) -> tuple[int, AsyncIterator[bytes]]:
    """How many bytes a file has, and those, piece by piece. Raises ApiError."""
    owner = PRINCIPAL.get().name
    file = await store.read(lambda db: find(db, name, owner))
    return file.bytes, _content(store, file)


async def _content(store: Store, file: File) -> AsyncIterator[bytes]:
    at = 0
    while (found := await store.read(partial(piece, file=file, after=at))) is not None:
        at, data = found
        yield data


async def delete(store: Store, name: str) -> dict[str, Any]:
    owner = PRINCIPAL.get().name
    await store.run(lambda db: _drop(db, find(db, name, owner)))
    return {"id": name, "object": "file", "deleted": True}


def find(db: sqlite3.Connection, name: str, owner: str, param: str | None = None) -> File:
    """Raises ApiError where its owner has no such file, which says what field (`param`) has named it."""
    for file in _select(db, "complete AND id = ? AND owner = ?", name, owner):
        if file.expires is None or file.expires > now():
            return file
    raise ApiError(404, f"there is no file {name[:100]!r}", param=param, code="file_not_found")


def lines(db: sqlite3.Connection, file: File, longest: int) -> Iterator[bytes]:
    """A file line by line. Of a line with more than `longest` bytes a part comes that has more, too."""
    at, rest = 0, b""
    while (found := piece(db, file, at)) is not None:
        at, data = found
        *whole, rest = (rest + data).split(b"\n")
        yield from whole
        if len(rest) > longest:
            rest = rest[: longest + 1]
    yield rest


def piece(db: sqlite3.Connection, file: File, after: int) -> tuple[int, bytes] | None:
    """A piece of the content behind row `after`, and the number of the last row in it; None at the end of the file."""
    if file.batch is None:
        rows = db.execute("SELECT number, content FROM chunks WHERE file = ? AND number > ? LIMIT 1", (file.number, after))
    else:
        query = "SELECT number, answer FROM rows WHERE batch = ? AND state = ? AND number > ? ORDER BY number"
        rows = db.execute(query, (file.batch, file.state, after))
    found = bytearray()
    for number, part in rows:
        after = number
        found += part if file.batch is None else part + b"\n"
        if len(found) >= PIECE:
            break
    return (after, bytes(found)) if found else None


def _select(db: sqlite3.Connection, where: str, *given: Any) -> list[File]:
    return [File(*row) for row in db.execute(f"SELECT {COLUMNS} FROM files WHERE {where}", given)]


def _drop(db: sqlite3.Connection, file: File) -> None:
    """Delete a file and what it holds."""
    db.execute("DELETE FROM files WHERE number = ?", (file.number,))
    if file.batch is None:
        db.execute("DELETE FROM chunks WHERE file = ?", (file.number,))
        return
    db.execute("DELETE FROM rows WHERE batch = ? AND state = ?", (file.batch, file.state))
    (others,) = db.execute("SELECT count(*) FROM files WHERE batch = ?", (file.batch,)).fetchone()
    db.execute("UPDATE batches SET bytes = iif(?, bytes - ?, 0) WHERE number = ?", (others, file.bytes, file.batch))
