"""The states of batches and of their rows. Whatever becomes of either becomes so here, within a transaction of the store.

A row's end moves its batch's counters in the same transaction, and the last row's end is the end of the batch: no row is
looked at twice, and nothing is counted.
"""

import logging
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from headrace.server.access.principals import Principal
from headrace.server.http.api_error import ApiError
from headrace.server.http.ids import now
from headrace.server.storage import files

log = logging.getLogger("headrace.server")

# (state, event) -> state. What is not here cannot happen.
ROWS = {
    ("pending", "begin"): "running",
    ("running", "answer"): "done",
    ("running", "refuse"): "failed",
    ("running", "return"): "pending",
    ("pending", "drop"): "failed",
}
BATCHES = {
    ("in_progress", "cancel"): "cancelling",
    ("in_progress", "expire"): "finalizing",
    ("in_progress", "finish"): "completed",
    ("cancelling", "finish"): "cancelled",
    ("finalizing", "finish"): "expired",
}
ATTEMPTS = 3  # of a row
PIECE = 500  # rows that are dropped in one transaction
WHY = {"cancelling": "batch_cancelled", "finalizing": "batch_expired"}
DROPPED = "the batch ended before this request was begun"


class ImpossibleError(RuntimeError):
    """No such thing can happen to a batch or a row in its state."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row that has begun. `number` is its own."""

    number: int
    custom_id: str
    body: bytes
    attempts: int
    url: str
    owner: str


def move_batch(db: sqlite3.Connection, batch: int, event: str) -> str:
    """Returns what it has become. Raises ImpossibleError."""
    (state,) = db.execute("SELECT status FROM batches WHERE number = ?", (batch,)).fetchone()
    if (state, event) not in BATCHES:
        raise ImpossibleError(f"a batch that is {state} cannot {event}")
    new = BATCHES[state, event]
    stamp = f"{new}_at"
    db.execute(f"UPDATE batches SET status = ?, {stamp} = ? WHERE number = ?", (new, now(), batch))
    return new


def move_row(db: sqlite3.Connection, row: int, event: str) -> None:
    """Raises ImpossibleError."""
    (state,) = db.execute("SELECT state FROM rows WHERE number = ?", (row,)).fetchone()
    if (state, event) not in ROWS:
        raise ImpossibleError(f"a row that is {state} cannot {event}")
    db.execute("UPDATE rows SET state = ? WHERE number = ?", (ROWS[state, event], row))


def recover(db: sqlite3.Connection) -> None:
    """What an earlier server was doing when it ended may be why it did: its rows are tried again, and their tries counted."""
    for row in _running(db):
        lose(db, row, "server_lost", "the server ended while it had this request")
    ended = "SELECT number FROM batches WHERE status IN ('in_progress', 'cancelling', 'finalizing') AND done + failed = total"
    for (batch,) in db.execute(ended).fetchall():
        _finish(db, batch)


def give_back(db: sqlite3.Connection) -> None:
    """A server that ends in order leaves no row under way; no try is counted."""
    for row in _running(db):
        move_row(db, row, "return")


def _running(db: sqlite3.Connection) -> list[int]:
    query = (
        "SELECT rows.number FROM batches CROSS JOIN rows ON rows.batch = batches.number AND state = 'running' "
        "WHERE status IN ('in_progress', 'cancelling', 'finalizing')"
    )
    return [row for (row,) in db.execute(query)]


def owners(db: sqlite3.Connection) -> list[str]:
    """Who has batches in progress, the oldest first."""
    query = "SELECT owner FROM batches WHERE status = 'in_progress' GROUP BY owner ORDER BY min(number)"
    return [owner for (owner,) in db.execute(query)]


def begin(db: sqlite3.Connection, room: int, alone: bool, running: Mapping[str, int]) -> list[Row]:
    """Begin up to `room` rows: of the owners in `running` who has the fewest under way comes first, and of one owner the oldest
    batch. Rows under which the engine or the server has ended come last and, where nothing else is under way (`alone`), one by
    one: so it shows which of them it was, and it takes no other along."""
    under_way = Counter(running)
    fresh = {owner: _pending(db, owner, "= 0", room) for owner in running}
    rows: list[int] = []
    while len(rows) < room and (left := [owner for owner in running if fresh[owner]]):
        owner = min(left, key=under_way.__getitem__)
        under_way[owner] += 1
        rows.append(fresh[owner].pop(0))
    if not rows and alone:
        rows = [row for owner in running for row in _pending(db, owner, "> 0", 1)][:1]
    for row in rows:
        move_row(db, row, "begin")
    return [_row(db, row) for row in rows]


def _pending(db: sqlite3.Connection, owner: str, which: str, most: int) -> list[int]:
    """Rows to begin, by how often they were tried."""
    query = (
        "SELECT rows.number FROM batches CROSS JOIN rows "
        f"ON rows.batch = batches.number AND rows.state = 'pending' AND rows.attempts {which} "
        "WHERE status = 'in_progress' AND owner = ? ORDER BY batches.number, rows.attempts, rows.number LIMIT ?"
    )
    return [row for (row,) in db.execute(query, (owner, most))]


def _row(db: sqlite3.Connection, row: int) -> Row:
    query = "SELECT rows.number, custom_id, body, attempts, endpoint, owner FROM rows JOIN batches ON batch = batches.number"
    return Row(*db.execute(f"{query} WHERE rows.number = ?", (row,)).fetchone())


def settle(
    db: sqlite3.Connection, row: int, answer: bytes, *, failed: bool, most: int | None = None, who: Principal | None = None
) -> None:
    """A row that runs has its answer: a line of the batch's output or, `failed`, of its errors.

    Raises ApiError where all batches may hold `most` bytes and do, and those of `who` its share.
    """
    batch, body = db.execute("SELECT batch, length(body) FROM rows WHERE number = ?", (row,)).fetchone()
    if most is not None:
        check_room(db, len(answer) + 1 - body, most, who or Principal())
    move_row(db, row, "refuse" if failed else "answer")
    _end(db, row, batch, body, answer, failed)


def lose(db: sqlite3.Connection, row: int, code: str, error: str) -> None:
    """A try of a row that runs has failed, and the next may not; after ATTEMPTS tries that is its answer."""
    db.execute("UPDATE rows SET attempts = attempts + 1, error = ? WHERE number = ?", (error, row))
    custom_id, attempts = db.execute("SELECT custom_id, attempts FROM rows WHERE number = ?", (row,)).fetchone()
    if attempts < ATTEMPTS:
        move_row(db, row, "return")
    else:
        message = f"{error}, and it was tried {attempts} times; the server's log says more"
        settle(db, row, unanswered(row, custom_id, code, message), failed=True)


def stop(db: sqlite3.Connection) -> bool:
    """Drop some of the rows that batches which are cancelled or past their time have not begun; whether there may be more."""
    past = "SELECT number FROM batches WHERE status = 'in_progress' AND expires_at <= ?"
    for (batch,) in db.execute(past, (now(),)).fetchall():
        move_batch(db, batch, "expire")
    query = (
        "SELECT rows.number, batch, custom_id, length(body), status FROM batches CROSS JOIN rows "
        "ON rows.batch = batches.number AND rows.state = 'pending' WHERE status IN ('cancelling', 'finalizing') LIMIT ?"
    )
    found = db.execute(query, (PIECE,)).fetchall()
    for row, batch, custom_id, body, status in found:
        move_row(db, row, "drop")
        _end(db, row, batch, body, unanswered(row, custom_id, WHY[status], DROPPED), failed=True)
    return len(found) == PIECE


def is_open(db: sqlite3.Connection, row: int) -> bool:
    """Whether a row's batch still wants its answer."""
    query = "SELECT status, expires_at FROM batches WHERE number = (SELECT batch FROM rows WHERE number = ?)"
    status, expires = db.execute(query, (row,)).fetchone()
    return bool(status == "in_progress" and expires > now())


def next_expiry(db: sqlite3.Connection) -> int | None:
    """When the first of the open batches expires."""
    (when,) = db.execute("SELECT min(expires_at) FROM batches WHERE status = 'in_progress'").fetchone()
    return None if when is None else int(when)


def check_room(db: sqlite3.Connection, more: int, most: int, who: Principal) -> None:
    """Whether the batches of `who`, and all together, may hold so many bytes more. Raises ApiError."""
    held = "SELECT coalesce(sum(bytes), 0), coalesce(sum(bytes) FILTER (WHERE owner = ?), 0) FROM batches"
    if more > 0 and who.room(most, *db.execute(held, (who.name,)).fetchone()) < more:
        message = f"the server keeps {most} bytes of batches and is full; delete the files of some that have ended"
        raise ApiError(400, message, code="storage_full")


def unanswered(row: int, custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that has no answer."""
    return line(row, custom_id, None, {"code": code, "message": message})


def line(row: int, custom_id: str, response: dict[str, object] | None, error: dict[str, str] | None = None) -> bytes:
    """A line of an output or error file."""
    return msgspec.json.encode({"id": f"batch_req_{row}", "custom_id": custom_id, "response": response, "error": error})


def _end(db: sqlite3.Connection, row: int, batch: int, body: int, answer: bytes, failed: bool) -> None:
    """Keep a row's answer in place of its request, count it, and end its batch when it was the last."""
    size = len(answer) + 1
    db.execute("UPDATE rows SET answer = ?, body = NULL WHERE number = ?", (answer, row))
    counts = "failed = failed + 1, error_bytes = error_bytes" if failed else "done = done + 1, output_bytes = output_bytes"
    db.execute(f"UPDATE batches SET {counts} + ?, bytes = bytes + ? WHERE number = ?", (size, size - body, batch))
    left = "SELECT total - done - failed FROM batches WHERE number = ?"
    if db.execute(left, (batch,)).fetchone() == (0,):
        _finish(db, batch)


def _finish(db: sqlite3.Connection, batch: int) -> None:
    """The answers, which stay where they are, become files."""
    query = "SELECT id, owner, output_life, done, failed, output_bytes, error_bytes FROM batches WHERE number = ?"
    name, owner, life, done, failed, *sizes = db.execute(query, (batch,)).fetchone()
    db.execute("UPDATE batches SET finalizing_at = coalesce(finalizing_at, ?) WHERE number = ?", (now(), batch))
    for kind, state, count, size in (("output", "done", done, sizes[0]), ("error", "failed", failed, sizes[1])):
        if count:
            column = f"{kind}_file"
            made = files.of_rows(db, f"{name}_{kind}.jsonl", size, life, batch, state, owner)
            db.execute(f"UPDATE batches SET {column} = ? WHERE number = ?", (made, batch))
    log.info("batch %s is %s", name, move_batch(db, batch, "finish"))
