"""/v1/batches: made of a file of requests, listed, cancelled. `batch_rows` has their states, `batch_worker` does the work."""

import json
import sqlite3
from typing import Any

from headrace.server import batch_input, batch_rows, files
from headrace.server.answers import new_id, now
from headrace.server.errors import ApiError, bad
from headrace.server.fields import BatchRequest
from headrace.server.settings import Limits
from headrace.server.store import Store, listing

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
DAY = 24 * 3600
STAMPS = "in_progress_at finalizing_at completed_at failed_at expired_at cancelling_at cancelled_at"
COLUMNS = (
    "id, status, endpoint, input_file, output_file, error_file, output_life, metadata, errors, total, done, failed, "
    f"created_at, expires_at, {STAMPS.replace(' ', ', ')}"
)


async def create(store: Store, request: BatchRequest, limits: Limits) -> dict[str, Any]:
    """Check an input file and queue its lines. Raises ApiError."""
    if request.endpoint not in ENDPOINTS:
        raise bad(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
    if request.completion_window != "24h":
        raise bad("completion_window must be 24h", "completion_window")
    files.life(request.output_expires_after, "output_expires_after")

    def work(db: sqlite3.Connection) -> dict[str, Any]:
        file = files.find(db, request.input_file_id, "input_file_id")
        batch_rows.check_room(db, file.bytes, limits.batch_bytes)
        _forget(db, limits.batches)
        batch, name = _insert(db, request)
        total, size, errors = batch_input.add_rows(db, batch, file, request.endpoint, limits)
        if errors:
            query = "UPDATE batches SET status = 'failed', failed_at = created_at, errors = ? WHERE number = ?"
            db.execute(query, (json.dumps(errors), batch))
        else:
            batch_rows.check_room(db, size, limits.batch_bytes)
            columns = "status = 'in_progress', in_progress_at = created_at, total = ?, bytes = ?"
            db.execute(f"UPDATE batches SET {columns} WHERE number = ?", (total, size, batch))
        return load(db, name)

    return await store.run(work)


def _insert(db: sqlite3.Connection, request: BatchRequest) -> tuple[int, str]:
    """A batch without rows: its number and its id."""
    name, created = new_id("batch"), now()
    metadata = json.dumps(request.metadata)
    life = (request.output_expires_after or {}).get("seconds")
    row = (name, request.endpoint, request.input_file_id, life, metadata, created, created + DAY)
    query = "INSERT INTO batches (status, id, endpoint, input_file, output_life, metadata, created_at, expires_at)"
    return int(db.execute(f"{query} VALUES ('validating', ?, ?, ?, ?, ?, ?, ?)", row).lastrowid or 0), name


def _forget(db: sqlite3.Connection, most: int) -> None:
    """Make room for one more among `most` batches: the oldest that have ended and hold nothing go. Raises ApiError."""
    (count,) = db.execute("SELECT count(*) FROM batches").fetchone()
    ended = "status NOT IN ('in_progress', 'cancelling', 'finalizing') AND bytes = 0"
    where = f"number IN (SELECT number FROM batches WHERE {ended} ORDER BY number LIMIT ?)"
    if count >= most and db.execute(f"DELETE FROM batches WHERE {where}", (count - most + 1,)).rowcount <= count - most:
        message = f"the server keeps {most} batches; delete the files of some that have ended"
        raise ApiError(400, message, code="storage_full")


async def listed(store: Store, after: str | None, limit: int) -> dict[str, Any]:
    query = (
        f"SELECT {COLUMNS} FROM batches WHERE ? IS NULL OR number < (SELECT number FROM batches WHERE id = ?) "
        "ORDER BY number DESC LIMIT ?"
    )
    rows = await store.read(lambda db: db.execute(query, (after, after, limit + 1)).fetchall())
    return listing([_object(row) for row in rows], None, limit)


async def find(store: Store, name: str) -> dict[str, Any]:
    return await store.read(lambda db: load(db, name))


async def cancel(store: Store, name: str) -> dict[str, Any]:
    """Lines that have not begun are not begun any more."""

    def work(db: sqlite3.Connection) -> dict[str, Any]:
        status = load(db, name)["status"]
        if status == "in_progress":
            (number,) = db.execute("SELECT number FROM batches WHERE id = ?", (name,)).fetchone()
            batch_rows.move_batch(db, number, "cancel")
        elif status != "cancelling":
            raise ApiError(409, f"the batch is {status} and cannot be cancelled", code="invalid_state")
        return load(db, name)

    return await store.run(work)


def load(db: sqlite3.Connection, name: str) -> dict[str, Any]:
    """Raises ApiError where there is no such batch."""
    row = db.execute(f"SELECT {COLUMNS} FROM batches WHERE id = ?", (name,)).fetchone()
    if row is None:
        raise ApiError(404, f"there is no batch {name[:100]!r}", code="batch_not_found")
    return _object(row)


def _object(row: tuple[Any, ...]) -> dict[str, Any]:
    """As the protocol has it."""
    (name, status, endpoint, given, output, error, life, metadata, errors, total, done, failed, created, expires, *stamps) = row
    return {
        "id": name,
        "object": "batch",
        "endpoint": endpoint,
        "errors": errors and {"object": "list", "data": json.loads(errors)},
        "input_file_id": given,
        "completion_window": "24h",
        "status": status,
        "output_file_id": output,
        "error_file_id": error,
        "created_at": created,
        "expires_at": expires,
        **dict(zip(STAMPS.split(), stamps, strict=True)),
        "output_expires_after": life and {"anchor": "created_at", "seconds": life},
        "request_counts": {"total": total, "completed": done, "failed": failed},
        "metadata": json.loads(metadata),
    }
