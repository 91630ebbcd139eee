"""/v1/batches: create from a file of requests, list, cancel. `batch_rows` has the states; `batch_worker` runs the rows."""

import json
import sqlite3
from functools import partial
from typing import Any

from headrace.server.access.principals import PRINCIPAL, Principal
from headrace.server.http.api_error import ApiError, bad
from headrace.server.protocols.fields import BatchRequest
from headrace.server.protocols.openai_types import new_id, now
from headrace.server.settings import Limits
from headrace.server.storage import batch_input, batch_rows, files
from headrace.server.storage.store import Store, listing

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
DAY_SECONDS = 24 * 3600
STAMPS = "in_progress_at finalizing_at completed_at failed_at expired_at cancelling_at cancelled_at"
COLUMNS = (
    "id, status, endpoint, input_file, output_file, error_file, output_life, metadata, errors, total, done, failed, "
    f"created_at, expires_at, {STAMPS.replace(' ', ', ')}"
)


async def create(store: Store, request: BatchRequest, limits: Limits) -> dict[str, Any]:
    """Check all lines of an input file, then queue them in one transaction. Raises ApiError."""
    if request.endpoint not in ENDPOINTS:
        raise bad(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
    if request.completion_window != "24h":
        raise bad("completion_window must be 24h", "completion_window")
    files.lifetime(request.output_expires_after, "output_expires_after")
    who = PRINCIPAL.get()

    find = partial(files.find, name=request.input_file_id, owner=who.name, param="input_file_id")
    check = batch_input.InputCheck(await store.read(find), request.endpoint, limits)
    await check.run(store)

    def work(db: sqlite3.Connection) -> dict[str, Any]:
        # Raises if the file was deleted since the check.
        file = find(db)
        if not check.errors:
            batch_rows.check_room(db, check.size, limits.batch_bytes, who)
        _forget(db, limits.batches, who)
        batch, name = _insert(db, request, who.name)
        if check.errors:
            query = "UPDATE batches SET status = 'failed', failed_at = created_at, errors = ? WHERE number = ?"
            db.execute(query, (json.dumps(check.errors), batch))
        else:
            batch_input.add_rows(db, batch, file, limits)
            columns = "status = 'in_progress', in_progress_at = created_at, total = ?, bytes = ?"
            db.execute(f"UPDATE batches SET {columns} WHERE number = ?", (check.count, check.size, batch))
        return load(db, name, who.name)

    return await store.run(work)


def _insert(db: sqlite3.Connection, request: BatchRequest, owner: str) -> tuple[int, str]:
    """Insert a batch without rows. Returns its number and its id."""
    name, created = new_id("batch"), now()
    metadata = json.dumps(request.metadata)
    life = (request.output_expires_after or {}).get("seconds")
    row = (name, request.endpoint, request.input_file_id, life, metadata, created, created + DAY_SECONDS, owner)
    query = "INSERT INTO batches (status, id, endpoint, input_file, output_life, metadata, created_at, expires_at, owner)"
    return int(db.execute(f"{query} VALUES ('validating', ?, ?, ?, ?, ?, ?, ?, ?)", row).lastrowid or 0), name


def _forget(db: sqlite3.Connection, most: int, who: Principal) -> None:
    """Make room for one more of `most` batches. Deletes the oldest ended batches without rows: those of `who`, and if all
    batches are used up, those of other owners. Raises ApiError if that is not enough."""
    held, own = db.execute("SELECT count(*), coalesce(sum(owner = ?), 0) FROM batches", (who.name,)).fetchone()
    gone = 1 - who.room(most, held, own)
    ended = "status NOT IN ('in_progress', 'cancelling', 'finalizing') AND bytes = 0 AND (owner = ? OR ?)"
    where = f"number IN (SELECT number FROM batches WHERE {ended} ORDER BY owner <> ?, number LIMIT ?)"
    given = (who.name, held >= most, who.name, gone)
    if gone > 0 and db.execute(f"DELETE FROM batches WHERE {where}", given).rowcount < gone:
        message = f"the server keeps {most} batches; delete the files of some that have ended"
        raise ApiError(400, message, code="storage_full")


async def list_batches(store: Store, after: str | None, limit: int) -> dict[str, Any]:
    query = (
        f"SELECT {COLUMNS} FROM batches WHERE owner = :owner AND "
        "(:after IS NULL OR number < (SELECT number FROM batches WHERE id = :after AND owner = :owner)) "
        "ORDER BY number DESC LIMIT :most"
    )
    given = {"owner": PRINCIPAL.get().name, "after": after, "most": limit + 1}
    rows = await store.read(lambda db: db.execute(query, given).fetchall())
    return listing([_object(row) for row in rows], None, limit)


async def find(store: Store, name: str) -> dict[str, Any]:
    owner = PRINCIPAL.get().name
    return await store.read(lambda db: load(db, name, owner))


async def cancel(store: Store, name: str) -> dict[str, Any]:
    """Start no more rows of a batch."""
    owner = PRINCIPAL.get().name

    def work(db: sqlite3.Connection) -> dict[str, Any]:
        status = load(db, name, owner)["status"]
        if status == "in_progress":
            (number,) = db.execute("SELECT number FROM batches WHERE id = ?", (name,)).fetchone()
            batch_rows.move_batch(db, number, "cancel")
        elif status != "cancelling":
            raise ApiError(409, f"the batch is {status} and cannot be cancelled", code="invalid_state")
        return load(db, name, owner)

    return await store.run(work)


def load(db: sqlite3.Connection, name: str, owner: str) -> dict[str, Any]:
    """The batch as JSON data. Raises ApiError (404) if the owner has no such batch."""
    row = db.execute(f"SELECT {COLUMNS} FROM batches WHERE id = ? AND owner = ?", (name, owner)).fetchone()
    if row is None:
        raise ApiError(404, f"there is no batch {name[:100]!r}", code="batch_not_found")
    return _object(row)


def _object(row: tuple[Any, ...]) -> dict[str, Any]:
    """A row of COLUMNS as the batch object of the protocol."""
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
