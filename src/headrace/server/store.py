"""What a server keeps: files, batches, responses, in one SQLite database that survives its end, however that comes."""

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

T = TypeVar("T")
VERSION = 2
SCHEMA = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, created INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
    expires INTEGER, content BLOB NOT NULL
);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, status TEXT NOT NULL, expires INTEGER NOT NULL,
    object TEXT NOT NULL, bytes INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, body TEXT, failed INTEGER, answer TEXT,
    attempts INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE INDEX unanswered ON lines (batch, number) WHERE answer IS NULL;
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, created INTEGER NOT NULL, bytes INTEGER NOT NULL,
    object TEXT NOT NULL, input TEXT NOT NULL
);
"""


# From version 1: what an open batch takes, and how often the engine ended under a line.
UPGRADE = """
ALTER TABLE batches ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE lines ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0;
"""


class StoreError(ValueError):
    """The database cannot be used; one line that says what to change."""


class Store:
    """The database in a folder, for one server at a time; without a folder it lasts as long as this object.

    Raises StoreError where another server holds it, or where it is none of ours.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._lock: FileLock | None = None
        if folder is not None:
            self._lock = _only_one(folder)
        self._busy = asyncio.Lock()
        try:
            self._connection = _open(":memory:" if folder is None else str(folder / "server.sqlite"))
        except sqlite3.Error as error:
            raise StoreError(f"{folder}: the server's database cannot be used ({error}); give another --state") from None

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """One transaction, off the event loop: all of what `work` does is kept, or, when it raises, nothing.

        Who is cancelled meanwhile still waits for its end: there is one connection, and the next would begin within it.
        """
        async with self._busy:
            transaction = asyncio.create_task(asyncio.to_thread(self._transaction, work))
            try:
                return await asyncio.shield(transaction)
            finally:
                while not transaction.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait({transaction})

    def close(self) -> None:
        self._connection.close()
        if self._lock is not None:
            self._lock.release()

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        return result


def _only_one(folder: Path) -> FileLock:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(folder / "server.lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise StoreError(f"{folder} is in use by another server; give this one another --state") from None
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written ({error.strerror}); give another --state") from None
    return lock


def _open(path: str) -> sqlite3.Connection:
    """A connection to a database of ours, made where there is none. Raises sqlite3.Error."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
    elif version == 1:
        connection.executescript(f"BEGIN; {UPGRADE} PRAGMA user_version = {VERSION}; COMMIT;")
    elif version != VERSION:
        raise sqlite3.DatabaseError(f"it has version {version} and this Headrace writes {VERSION}")
    return connection


def page(rows: list[Any], after: str | None, limit: int) -> tuple[list[Any], bool]:
    """The rows after the one with id `after`, at most `limit`, and whether there are more."""
    if after is not None:
        at = next((number for number, row in enumerate(rows) if row["id"] == after), len(rows))
        rows = rows[at + 1 :]
    return rows[:limit], len(rows) > limit


def listing(rows: list[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """A page of objects as the protocol lists them."""
    kept, more = page(rows, after, limit)
    first, last = (kept[0]["id"], kept[-1]["id"]) if kept else (None, None)
    return {"object": "list", "data": kept, "first_id": first, "last_id": last, "has_more": more}
