"""States of batches and of their rows. Every change of state happens here, in a transaction of the store.

The end of a row updates the counters of its batch in the same transaction, and the end of the last row ends the batch.
So no query has to count rows.
"""

import logging
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from headrace.server.access.principals import Principal
from headrace.server.http.api_error import ApiError
from headrace.server.protocols.openai_types import now
from headrace.server.storage import files

log = logging.getLogger("headrace.server")

# (state, event) -> state. Other pairs raise RuntimeError.
ROW_TRANSITIONS = {
    ("pending", "begin"): "running",
    ("running", "answer"): "done",
    ("running", "refuse"): "failed",
    ("running", "return"): "pending",
    ("pending", "drop"): "failed",
}
BATCH_TRANSITIONS = {
    ("in_progress", "cancel"): "cancelling",
    ("in_progress", "expire"): "finalizing",
    ("in_progress", "finish"): "completed",
    ("cancelling", "finish"): "cancelled",
    ("finalizing", "finish"): "expired",
}
# Attempts at a row before it fails.
ATTEMPTS = 3
# Rows that one transaction drops.
DROPPED_AT_ONCE = 500
DROP_CODES = {"cancelling": "batch_cancelled", "finalizing": "batch_expired"}
DROP_MESSAGE = "the batch ended before this request was begun"


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A running row: one request of a batch."""

    number: int
    custom_id: str
    body: bytes
    attempts: int
    url: str
    owner: str


def move_batch(db: sqlite3.Connection, batch: int, event: str) -> str:
    """Apply an event to a batch. Returns the new state. Raises RuntimeError."""
    (state,) = db.execute("SELECT status FROM batches WHERE number = ?", (batch,)).fetchone()
    if (state, event) not in BATCH_TRANSITIONS:
        raise RuntimeError(f"a batch that is {state} cannot {event}")
    new = BATCH_TRANSITIONS[state, event]
    stamp = f"{new}_at"
    db.execute(f"UPDATE batches SET status = ?, {stamp} = ? WHERE number = ?", (new, now(), batch))
    return new


def move_row(db: sqlite3.Connection, row: int, event: str) -> None:
    """Apply an event to a row. Raises RuntimeError."""
    (state,) = db.execute("SELECT state FROM rows WHERE number = ?", (row,)).fetchone()
    if (state, event) not in ROW_TRANSITIONS:
        raise RuntimeError(f"a row that is {state} cannot {event}")
    db.execute("UPDATE rows SET state = ? WHERE number = ?", (ROW_TRANSITIONS[state, event], row))


def recover(db: sqlite3.Connection) -> None:
    """Return the rows that an earlier server ran when it crashed. That counts as an attempt: they may be the cause."""
    for row in _running(db):
        fail_attempt(db, row, "server_lost", "the server ended while it had this request")
    ended = "SELECT number FROM batches WHERE status IN ('in_progress', 'cancelling', 'finalizing') AND done + failed = total"
    for (batch,) in db.execute(ended).fetchall():
        _finish(db, batch)


def return_running(db: sqlite3.Connection) -> None:
    """Return the running rows at an orderly shutdown. That does not count as an attempt."""
    for row in _running(db):
        move_row(db, row, "return")


def _running(db: sqlite3.Connection) -> list[int]:
    query = (
        "SELECT rows.number FROM batches CROSS JOIN rows ON rows.batch = batches.number AND state = 'running' "
        "WHERE status IN ('in_progress', 'cancelling', 'finalizing')"
    )
    return [row for (row,) in db.execute(query)]


def active_owners(db: sqlite3.Connection) -> list[str]:
    """Owners of batches in progress, by the age of their oldest batch."""
    query = "SELECT owner FROM batches WHERE status = 'in_progress' GROUP BY owner ORDER BY min(number)"
    return [owner for (owner,) in db.execute(query)]


def start_rows(db: sqlite3.Connection, room: int, alone: bool, running: Mapping[str, int]) -> list[BatchRow]:
    """Start up to `room` rows. `running`: owner -> running rows; the owner with the fewest comes first, then the oldest batch.

    Rows during which the engine or the server crashed come last, one at a time, and only if no other row is running
    (`alone`): so a crash shows which row causes it, and hits no other row.
    """
    counts = Counter(running)
    fresh = {owner: _pending(db, owner, "= 0", room) for owner in running}
    rows: list[int] = []
    while len(rows) < room and (left := [owner for owner in running if fresh[owner]]):
        owner = min(left, key=counts.__getitem__)
        counts[owner] += 1
        rows.append(fresh[owner].pop(0))
    if not rows and alone:
        rows = [row for owner in running for row in _pending(db, owner, "> 0", 1)][:1]
    for row in rows:
        move_row(db, row, "begin")
    return [_row(db, row) for row in rows]


def _pending(db: sqlite3.Connection, owner: str, which: str, most: int) -> list[int]:
    """Numbers of pending rows whose attempts satisfy a condition, by batch and attempts."""
    query = (
        "SELECT rows.number FROM batches CROSS JOIN rows "
        f"ON rows.batch = batches.number AND rows.state = 'pending' AND rows.attempts {which} "
        "WHERE status = 'in_progress' AND owner = ? ORDER BY batches.number, rows.attempts, rows.number LIMIT ?"
    )
    return [row for (row,) in db.execute(query, (owner, most))]


def _row(db: sqlite3.Connection, row: int) -> BatchRow:
    query = "SELECT rows.number, custom_id, body, attempts, endpoint, owner FROM rows JOIN batches ON batch = batches.number"
    return BatchRow(*db.execute(f"{query} WHERE rows.number = ?", (row,)).fetchone())


def finish_row(
    db: sqlite3.Connection, row: int, answer: bytes, *, failed: bool, most: int | None = None, who: Principal | None = None
) -> None:
    """End a running row with a line of the batch's output file or, if `failed`, of its error file.

    Raises ApiError if the line does not fit into the `most` bytes of all batches, or the share of `who`.
    """
    batch, body = db.execute("SELECT batch, length(body) FROM rows WHERE number = ?", (row,)).fetchone()
    if most is not None:
        check_room(db, len(answer) + 1 - body, most, who or Principal())
    move_row(db, row, "refuse" if failed else "answer")
    _store_end(db, row, batch, body, answer, failed)


def fail_attempt(db: sqlite3.Connection, row: int, code: str, error: str) -> None:
    """Record a failed attempt at a running row. After ATTEMPTS attempts the row fails with this error."""
    db.execute("UPDATE rows SET attempts = attempts + 1, error = ? WHERE number = ?", (error, row))
    custom_id, attempts = db.execute("SELECT custom_id, attempts FROM rows WHERE number = ?", (row,)).fetchone()
    if attempts < ATTEMPTS:
        move_row(db, row, "return")
    else:
        message = f"{error}, and it was tried {attempts} times; see the server's log"
        finish_row(db, row, error_line(row, custom_id, code, message), failed=True)


def drop_pending(db: sqlite3.Connection) -> bool:
    """Drop pending rows of cancelled and expired batches. Returns whether there may be more of them."""
    past = "SELECT number FROM batches WHERE status = 'in_progress' AND expires_at <= ?"
    for (batch,) in db.execute(past, (now(),)).fetchall():
        move_batch(db, batch, "expire")
    query = (
        "SELECT rows.number, batch, custom_id, length(body), status FROM batches CROSS JOIN rows "
        "ON rows.batch = batches.number AND rows.state = 'pending' WHERE status IN ('cancelling', 'finalizing') LIMIT ?"
    )
    rows = db.execute(query, (DROPPED_AT_ONCE,)).fetchall()
    for row, batch, custom_id, body, status in rows:
        move_row(db, row, "drop")
        _store_end(db, row, batch, body, error_line(row, custom_id, DROP_CODES[status], DROP_MESSAGE), failed=True)
    return len(rows) == DROPPED_AT_ONCE


def is_row_open(db: sqlite3.Connection, row: int) -> bool:
    """Whether the batch of a row is in progress and not expired."""
    query = "SELECT status, expires_at FROM batches WHERE number = (SELECT batch FROM rows WHERE number = ?)"
    status, expires = db.execute(query, (row,)).fetchone()
    return bool(status == "in_progress" and expires > now())


def next_expiry(db: sqlite3.Connection) -> int | None:
    """Earliest expiry (Unix seconds) of the batches in progress."""
    (when,) = db.execute("SELECT min(expires_at) FROM batches WHERE status = 'in_progress'").fetchone()
    return None if when is None else int(when)


def check_room(db: sqlite3.Connection, more: int, most: int, who: Principal) -> None:
    """Raises ApiError if `more` bytes do not fit into the `most` bytes of all batches, or the share of `who`."""
    held = "SELECT coalesce(sum(bytes), 0), coalesce(sum(bytes) FILTER (WHERE owner = ?), 0) FROM batches"
    if more > 0 and who.room(most, *db.execute(held, (who.name,)).fetchone()) < more:
        message = f"the server keeps {most} bytes of batches and is full; delete the files of some that have ended"
        raise ApiError(400, message, code="storage_full")


def error_line(row: int, custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that got no answer."""
    return output_line(row, custom_id, None, {"code": code, "message": message})


def output_line(row: int, custom_id: str, response: dict[str, object] | None, error: dict[str, str] | None = None) -> bytes:
    """One line of an output or error file."""
    return msgspec.json.encode({"id": f"batch_req_{row}", "custom_id": custom_id, "response": response, "error": error})


def _store_end(db: sqlite3.Connection, row: int, batch: int, body: int, answer: bytes, failed: bool) -> None:
    """Replace the request of a row by its answer, update the counters, and finish the batch after its last row."""
    size = len(answer) + 1
    db.execute("UPDATE rows SET answer = ?, body = NULL WHERE number = ?", (answer, row))
    counts = "failed = failed + 1, error_bytes = error_bytes" if failed else "done = done + 1, output_bytes = output_bytes"
    db.execute(f"UPDATE batches SET {counts} + ?, bytes = bytes + ? WHERE number = ?", (size, size - body, batch))
    left = "SELECT total - done - failed FROM batches WHERE number = ?"
    if db.execute(left, (batch,)).fetchone() == (0,):
        _finish(db, batch)


def _finish(db: sqlite3.Connection, batch: int) -> None:
    """End a batch. Its output and error files are names for its rows, which stay in place."""
    query = "SELECT id, owner, output_life, done, failed, output_bytes, error_bytes FROM batches WHERE number = ?"
    name, owner, life, done, failed, *sizes = db.execute(query, (batch,)).fetchone()
    db.execute("UPDATE batches SET finalizing_at = coalesce(finalizing_at, ?) WHERE number = ?", (now(), batch))
    for kind, state, count, size in (("output", "done", done, sizes[0]), ("error", "failed", failed, sizes[1])):
        if count:
            column = f"{kind}_file"
            file = files.add_batch_file(db, f"{name}_{kind}.jsonl", size, life, batch, state, owner)
            db.execute(f"UPDATE batches SET {column} = ? WHERE number = ?", (file, batch))
    log.info("batch %s is %s", name, move_batch(db, batch, "finish"))
