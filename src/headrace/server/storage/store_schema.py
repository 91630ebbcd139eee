"""Tables of the store, and the upgrade of databases of earlier versions."""

import contextlib
import json
import sqlite3
from typing import Any

VERSION = 4
# Size of the chunks in which files are read and written.
PIECE_BYTES = 256 << 10
# Bytes of the write-ahead log that stay on disk.
WAL_LIMIT = 64 << 20
# Bytes that a row of a batch counts for in addition to its texts.
ROW_OVERHEAD = 256

# The answers of a batch stay in its rows. The files of a batch (those with a `batch`) are read from the rows.
# owner: name of the principal.
# batches.bytes: size of all rows, requests and answers; output_bytes, error_bytes: sizes of the two files.
# rows.error: error of the last counted attempt.
SCHEMA = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, created INTEGER NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, expires INTEGER, complete INTEGER NOT NULL, batch INTEGER, state TEXT,
    owner TEXT NOT NULL DEFAULT 'anonymous'
);
CREATE INDEX files_held ON files (batch, owner, bytes);
CREATE TABLE chunks (number INTEGER PRIMARY KEY, file INTEGER NOT NULL, content BLOB NOT NULL);
CREATE INDEX chunks_of ON chunks (file);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, status TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file TEXT NOT NULL, output_file TEXT, error_file TEXT, output_life INTEGER, metadata TEXT, errors TEXT,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER,
    completed_at INTEGER, failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0, done INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0, output_bytes INTEGER NOT NULL DEFAULT 0, error_bytes INTEGER NOT NULL DEFAULT 0,
    owner TEXT NOT NULL DEFAULT 'anonymous'
);
CREATE INDEX batches_held ON batches (owner, bytes);
CREATE INDEX batches_status ON batches (status);
CREATE TABLE rows (
    number INTEGER PRIMARY KEY AUTOINCREMENT, batch INTEGER NOT NULL, custom_id TEXT NOT NULL, state TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, error TEXT, body BLOB, answer BLOB
);
CREATE INDEX rows_state ON rows (batch, state);
CREATE INDEX rows_pending ON rows (batch, attempts) WHERE state = 'pending';
"""
RESPONSES = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, created INTEGER NOT NULL, bytes INTEGER NOT NULL,
    object TEXT NOT NULL, input TEXT NOT NULL, owner TEXT NOT NULL DEFAULT 'anonymous'
);
"""
# Version 1 did not count attempts.
FROM_1 = "ALTER TABLE lines ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0;"
# Versions up to 3 had one principal.
OWNED = "ALTER TABLE {} ADD COLUMN owner TEXT NOT NULL DEFAULT 'anonymous';"
FROM_3 = f"""
{OWNED.format("files")} {OWNED.format("batches")} DROP INDEX files_batch; DROP INDEX batches_bytes;
CREATE INDEX files_held ON files (batch, owner, bytes); CREATE INDEX batches_held ON batches (owner, bytes);
"""
# Versions 1 and 2 stored a file in one value, a batch as JSON, and its lines in a table of their own.
OLD = "ALTER TABLE files RENAME TO old_files; ALTER TABLE batches RENAME TO old_batches;"
OLD_FILES = """
INSERT INTO files (id, created, filename, purpose, bytes, expires, complete)
SELECT id, created, filename, purpose, bytes, expires, 1 FROM old_files ORDER BY created, rowid;
"""
OLD_ROWS = """
INSERT INTO rows (batch, custom_id, state, attempts, body, answer)
SELECT batches.number, custom_id, CASE WHEN answer IS NULL THEN 'pending' WHEN lines.failed THEN 'failed' ELSE 'done' END,
    attempts, CAST(body AS BLOB), CAST(answer AS BLOB)
FROM lines JOIN batches ON lines.batch = batches.id ORDER BY batches.number, lines.number;
"""
OLD_COUNTS = """
UPDATE batches SET (done, failed, output_bytes, error_bytes, bytes) = (
    SELECT coalesce(sum(state = 'done'), 0), coalesce(sum(state = 'failed'), 0),
        coalesce(sum(CASE state WHEN 'done' THEN length(answer) + 1 END), 0),
        coalesce(sum(CASE state WHEN 'failed' THEN length(answer) + 1 END), 0),
        coalesce(sum(:row + coalesce(length(body), 0) + coalesce(length(answer) + 1, 0)), 0)
    FROM rows WHERE rows.batch = batches.number
) WHERE status IN ('in_progress', 'cancelling')
"""
OLD_GONE = "DROP TABLE old_files; DROP TABLE old_batches; DROP TABLE lines;"


def open_database(path: str, *, reads: bool = False) -> sqlite3.Connection:
    """Connect to the database at `path`. Creates it if missing, and upgrades an earlier version. `reads`: read-only.

    Raises sqlite3.Error.
    """
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has an effect before the first table only
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT}")
    if reads:
        db.execute("PRAGMA query_only = ON")
        return db
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == 0:
        db.executescript(f"BEGIN; {SCHEMA} {RESPONSES} PRAGMA user_version = {VERSION}; COMMIT;")
    elif 0 < version < VERSION:
        _upgrade(db, version)
    elif version != VERSION:
        raise sqlite3.DatabaseError(f"it has version {version} and this Headrace writes {VERSION}")
    return db


def statements(db: sqlite3.Connection, script: str) -> None:
    """Run a script in the open transaction, which `executescript` would commit."""
    for statement in script.split(";"):
        db.execute(statement)


def _upgrade(db: sqlite3.Connection, version: int) -> None:
    """Upgrade a database in one transaction."""
    db.execute("BEGIN IMMEDIATE")
    try:
        if version < 3:
            _convert_to_rows(db, version)
        else:
            statements(db, FROM_3)
        statements(db, OWNED.format("responses"))
        db.execute(f"PRAGMA user_version = {VERSION}")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
    if version < 3:
        # Shrinks the file, which needs free disk space.
        with contextlib.suppress(sqlite3.OperationalError):
            db.execute("VACUUM")


def _convert_to_rows(db: sqlite3.Connection, version: int) -> None:
    """Upgrade versions 1 and 2: files in chunks, batches in columns and rows."""
    statements(db, (FROM_1 if version == 1 else "") + OLD + SCHEMA + OLD_FILES)
    for file, old in db.execute("SELECT number, old_files.rowid FROM files JOIN old_files USING (id)").fetchall():
        with db.blobopen("old_files", "content", old, readonly=True) as content:
            while piece := content.read(PIECE_BYTES):
                db.execute("INSERT INTO chunks (file, content) VALUES (?, ?)", (file, piece))
    for number, batch in db.execute("SELECT number, object FROM old_batches ORDER BY number").fetchall():
        _insert(db, "batches", _columns(number, json.loads(batch)))
    statements(db, OLD_ROWS)
    db.execute(OLD_COUNTS, {"row": ROW_OVERHEAD})
    statements(db, OLD_GONE)


def _columns(number: int, batch: dict[str, Any]) -> dict[str, Any]:
    """Columns of a batch that versions 1 and 2 stored as JSON."""
    same = ("id", "status", "endpoint", "created_at", "expires_at", "in_progress_at", "finalizing_at", "completed_at")
    row = {name: batch[name] for name in (*same, "failed_at", "expired_at", "cancelling_at", "cancelled_at")}
    files = {f"{kind}_file": batch[f"{kind}_file_id"] for kind in ("input", "output", "error")}
    counts = batch["request_counts"]
    errors = (batch["errors"] or {}).get("data")
    return {
        **row, **files, "number": number, "total": counts["total"], "done": counts["completed"], "failed": counts["failed"],
        "output_life": (batch.get("output_expires_after") or {}).get("seconds"),
        "metadata": json.dumps(batch["metadata"]), "errors": json.dumps(errors) if errors else None,
    }  # fmt: skip


def _insert(db: sqlite3.Connection, table: str, row: dict[str, Any]) -> None:
    names = ", ".join(row)
    places = ", ".join(f":{name}" for name in row)
    db.execute(f"INSERT INTO {table} ({names}) VALUES ({places})", row)
