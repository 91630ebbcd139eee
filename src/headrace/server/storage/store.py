"""Stored files, batches and responses in one SQLite database, which survives any end of the server."""

import asyncio
import contextlib
import logging
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from headrace.server.http.api_error import ApiError
from headrace.server.storage.store_schema import open_database

log = logging.getLogger("headrace.server")

T = TypeVar("T")
DATABASE = "server.sqlite"
# From the call of `run` or `read`: includes the wait for earlier transactions and for other users of the file.
TIMEOUT_SECONDS = 10.0
FULL = "the disk that holds the server's state is full; what it keeps is unharmed; make room there, then try again"
BUSY = "the server's database cannot be used now; try again in 5 s; see the server's log"
DAMAGED = "the server's database is damaged, see the log; stop the server, and start it with a copy or another --state"
# Errors of the disk, its permissions and other users of the file; not of a statement.
TRANSIENT_CODES = {
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOMEM),
    *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL),
}
DAMAGE_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


class StoreError(ValueError):
    """The database cannot be used. The message has one line and names the remedy."""


class StorageError(ApiError):
    """A transaction failed: the disk is full (507), the database is locked by another process (503) or damaged (500)."""


class Store:
    """The database in a folder, for one server at a time; without a folder it lasts as long as this object.

    One connection writes and another one reads at the same time. Each has a thread that runs one transaction after the other.
    Raises StoreError if another server uses the folder, or if the file is not a database of Headrace.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="headrace-") if folder is None else None
        self.folder = folder or Path(self._temporary.name if self._temporary is not None else "")
        self._lock = _lock_folder(self.folder)
        self._threads = (ThreadPoolExecutor(1, "store-writes"), ThreadPoolExecutor(1, "store-reads"))
        self.trouble = ""  # why the last write failed, in one line; empty after a successful write
        path = self.folder / DATABASE
        try:
            self.writer = open_database(str(path))
            self.reader = open_database(str(path), reads=True)
        except sqlite3.Error as error:
            self._lock.release()
            raise StoreError(f"{folder}: the server's database cannot be used ({error}); give another --state") from None
        for file in (path, *self.folder.glob(f"{DATABASE}-*")):
            # Files that SQLite creates later get the mode of the database.
            file.chmod(0o600)

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run one write transaction outside the event loop. It is committed, or rolled back if `work` raises.

        Raises StorageError if the database cannot be written. A cancelled caller waits for the end of the transaction.
        """
        return await self._do(self.writer, "BEGIN IMMEDIATE", work)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run one read transaction, concurrent with writes: it reads the state at its start. Raises StorageError."""
        return await self._do(self.reader, "BEGIN", work)

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        self.reader.close()
        self.writer.close()
        self._lock.release()
        if self._temporary is not None:
            self._temporary.cleanup()

    async def _do(self, db: sqlite3.Connection, begin: str, work: Callable[[sqlite3.Connection], T]) -> T:
        thread = self._threads[db is self.reader]
        asked = time.monotonic()
        transaction = asyncio.get_running_loop().run_in_executor(thread, lambda: _transaction(db, begin, work, asked))
        try:
            result = await asyncio.shield(transaction)
            if db is self.writer:
                self.trouble = ""
            return result
        except StorageError as error:
            # Log once until a write succeeds.
            if not self.trouble:
                log.error("the server's database cannot be used: %s", error.__cause__ or error)
            self.trouble = error.message
            raise
        finally:
            while not transaction.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({transaction})


def _transaction(db: sqlite3.Connection, begin: str, work: Callable[[sqlite3.Connection], T], asked: float) -> T:
    left = asked + TIMEOUT_SECONDS - time.monotonic()
    if left <= 0:
        cause = TimeoutError(f"the transactions before it took more than {TIMEOUT_SECONDS:g} s")
        raise StorageError(503, BUSY, code="storage_busy", retry_after=5) from cause
    try:
        db.execute(f"PRAGMA busy_timeout = {1000 * left:.0f}")
        db.execute(begin)
        try:
            result = work(db)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # SQLite may have rolled back already
                db.execute("ROLLBACK")
            raise
    except sqlite3.DatabaseError as error:
        if (code := error.sqlite_errorcode & 0xFF) in DAMAGE_CODES:
            raise StorageError(500, DAMAGED, code="storage_damaged") from error
        if code not in TRANSIENT_CODES:
            raise
        if code == sqlite3.SQLITE_FULL:
            raise StorageError(507, FULL, code="disk_full") from error
        raise StorageError(503, BUSY, code="storage_busy", retry_after=5) from error
    return result


def _lock_folder(folder: Path) -> FileLock:
    """Create a folder with mode 0700 and lock it. Raises StoreError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_mode & stat.S_ISVTX:
            raise StoreError(f"{folder} is shared by all users of this machine; give --state a folder of the server's own")
        folder.chmod(0o700)
        lock = FileLock(folder / "server.lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise StoreError(f"{folder} is in use by another server; give this one another --state") from None
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written ({error.strerror}); give another --state") from None
    return lock


def page(rows: list[Any], after: str | None, limit: int) -> tuple[list[Any], bool]:
    """At most `limit` rows after the row with the id `after`, and whether there are more."""
    if after is not None:
        at = next((number for number, row in enumerate(rows) if row["id"] == after), len(rows))
        rows = rows[at + 1 :]
    return rows[:limit], len(rows) > limit


def listing(rows: list[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """A page of objects in the list format of the protocol."""
    kept, more = page(rows, after, limit)
    first, last = (kept[0]["id"], kept[-1]["id"]) if kept else (None, None)
    return {"object": "list", "data": kept, "first_id": first, "last_id": last, "has_more": more}
