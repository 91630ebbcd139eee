"""/v1/batches: their life, from a file of requests to a file of answers. `batch_worker` does the work."""

import json
import sqlite3
from typing import Any

import msgspec

from headrace.server import files
from headrace.server.answers import new_id, now
from headrace.server.errors import ApiError, bad
from headrace.server.fields import BatchRequest
from headrace.server.settings import Limits
from headrace.server.store import Store, listing

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
DAY = 24 * 3600
OPEN = ("in_progress", "cancelling")
MAX_ERRORS = 20  # that a failed batch tells of
MAX_OUTPUT = 500_000_000  # bytes of one file: the database holds no value of twice that
STAMPS = "in_progress_at finalizing_at completed_at failed_at expired_at cancelling_at cancelled_at".split()


async def create(store: Store, request: BatchRequest, limits: Limits) -> dict[str, Any]:
    """Check an input file and queue its lines. Raises ApiError."""
    if request.endpoint not in ENDPOINTS:
        raise bad(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
    if request.completion_window != "24h":
        raise bad("completion_window must be 24h", "completion_window")
    files.life(request.output_expires_after, "output_expires_after")

    def work(db: sqlite3.Connection) -> dict[str, Any]:
        content = files.read(db, request.input_file_id, "input_file_id")
        files.check_room(db, len(content), limits.stored)
        lines, errors = read_lines(content, request.endpoint, limits.batch_lines)
        batch = _new(request)
        if errors:
            batch |= {"status": "failed", "failed_at": now(), "errors": {"object": "list", "data": errors}}
        else:
            batch |= {"status": "in_progress", "in_progress_at": now()}
            batch["request_counts"]["total"] = len(lines)
            rows = [(batch["id"], at, custom_id, body) for at, (custom_id, body) in enumerate(lines)]
            db.executemany("INSERT INTO lines (batch, number, custom_id, body) VALUES (?, ?, ?, ?)", rows)
        db.execute(
            "INSERT INTO batches (id, status, expires, object, bytes) VALUES (?, ?, ?, ?, ?)",
            (batch["id"], batch["status"], batch["expires_at"], json.dumps(batch), 0 if errors else len(content)),
        )
        return batch

    return await store.run(work)


def _new(request: BatchRequest) -> dict[str, Any]:
    return {
        "id": new_id("batch").replace("-", "_"),
        "object": "batch",
        "endpoint": request.endpoint,
        "errors": None,
        "input_file_id": request.input_file_id,
        "completion_window": request.completion_window,
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now(),
        "expires_at": now() + DAY,
        **dict.fromkeys(STAMPS),
        "output_expires_after": request.output_expires_after,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": request.metadata,
    }


def read_lines(content: bytes, endpoint: str, most: int) -> tuple[list[tuple[str, str]], list[dict[str, Any]]]:
    """(custom_id, body as JSON) of every line, and what is wrong, by line."""
    found: list[tuple[str, str]] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    lines = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    if len(lines) > most:
        return [], [_wrong("too_many_requests", f"at most {most} lines, not {len(lines)}; split the file", None)]
    if not lines:
        return [], [_wrong("empty_file", "the file has no lines", None)]
    for number, line in lines:
        problem, custom_id, body = _read_line(line, endpoint)
        if not problem and custom_id in seen:
            problem = f"custom_id {custom_id[:60]!r} is used twice"
        seen.add(custom_id)
        if problem:
            errors.append(_wrong("invalid_line", problem, number))
        else:
            found.append((custom_id, body))
        if len(errors) == MAX_ERRORS:
            break
    return found, errors


def _read_line(line: bytes, endpoint: str) -> tuple[str, str, str]:
    """What is wrong with a line (empty: nothing), its custom_id, its body."""
    try:
        data = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return "it is not JSON", "", ""
    if not isinstance(data, dict):
        return "it is not a JSON object", "", ""
    custom_id, body = data.get("custom_id"), data.get("body")
    if not isinstance(custom_id, str) or not custom_id or len(custom_id) > 512:
        return "custom_id must be text of 1 to 512 characters", "", ""
    if unknown := sorted(set(data) - {"custom_id", "method", "url", "body"}):
        return f"unknown field {unknown[0][:60]!r}", custom_id, ""
    if data.get("method", "POST") != "POST" or data.get("url") != endpoint:
        return f"method and url must be POST {endpoint}, the batch's endpoint", custom_id, ""
    if not isinstance(body, dict):
        return "body must be a JSON object", custom_id, ""
    if body.get("stream"):
        return "stream has no meaning in a batch; leave it out", custom_id, ""
    return "", custom_id, msgspec.json.encode(body).decode()


def _wrong(code: str, message: str, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": None}


async def listed(store: Store, after: str | None, limit: int) -> dict[str, Any]:
    rows = await store.run(lambda db: db.execute("SELECT object FROM batches ORDER BY number DESC").fetchall())
    return listing([json.loads(row[0]) for row in rows], after, limit)


async def find(store: Store, name: str) -> dict[str, Any]:
    return await store.run(lambda db: load(db, name))


async def cancel(store: Store, name: str) -> dict[str, Any]:
    """Lines that have not begun are not begun any more."""

    def work(db: sqlite3.Connection) -> dict[str, Any]:
        batch = load(db, name)
        if batch["status"] not in OPEN:
            raise ApiError(409, f"the batch is {batch['status']} and cannot be cancelled", code="invalid_state")
        if batch["status"] == "in_progress":
            batch |= {"status": "cancelling", "cancelling_at": now()}
            keep(db, batch)
        return batch

    return await store.run(work)


def load(db: sqlite3.Connection, name: str) -> dict[str, Any]:
    """A batch with its counts as they are. Raises ApiError where there is none."""
    row = db.execute("SELECT object FROM batches WHERE id = ?", (name,)).fetchone()
    if row is None:
        raise ApiError(404, f"there is no batch {name[:100]!r}", code="batch_not_found")
    batch: dict[str, Any] = json.loads(row[0])
    if batch["status"] in OPEN:
        count(db, batch)
    return batch


def is_open(db: sqlite3.Connection, name: str) -> bool:
    """Whether its lines are still to be answered."""
    status, expires = db.execute("SELECT status, expires FROM batches WHERE id = ?", (name,)).fetchone()
    return bool(status == "in_progress" and expires > now())


def count(db: sqlite3.Connection, batch: dict[str, Any]) -> None:
    done, failed = db.execute(
        "SELECT count(*) FILTER (WHERE NOT failed), count(*) FILTER (WHERE failed) FROM lines WHERE batch = ?", (batch["id"],)
    ).fetchone()
    batch["request_counts"] |= {"completed": done, "failed": failed}


def keep(db: sqlite3.Connection, batch: dict[str, Any]) -> None:
    """What a batch has become."""
    db.execute("UPDATE batches SET status = ?, object = ? WHERE id = ?", (batch["status"], json.dumps(batch), batch["id"]))


def finish(db: sqlite3.Connection, batch: dict[str, Any], status: str, most: int) -> str:
    """Write the answers into files, all in one transaction with the batch's end; lines without one go among the errors.
    Where `most` bytes of files do not hold them the batch has failed. Returns what has become of it."""
    batch |= {"finalizing_at": now()}
    db.execute("UPDATE batches SET bytes = 0 WHERE id = ?", (batch["id"],))
    (size,) = db.execute("SELECT coalesce(sum(length(answer) + 1), 0) FROM lines WHERE batch = ?", (batch["id"],)).fetchone()
    count(db, batch)
    try:
        files.check_room(db, size, most)
        if size > MAX_OUTPUT:
            raise ApiError(400, f"the answers have more than {MAX_OUTPUT} bytes; split the batch", code="output_too_large")
        _write(db, batch, {"cancelled": "batch_cancelled", "expired": "batch_expired"}.get(status, ""))
    except ApiError as error:
        status = "failed"
        batch |= {"errors": {"object": "list", "data": [_wrong(str(error.code), error.message, None)]}}
    db.execute("DELETE FROM lines WHERE batch = ?", (batch["id"],))
    batch |= {"status": status, f"{status}_at": now()}
    keep(db, batch)
    return status


def _write(db: sqlite3.Connection, batch: dict[str, Any], reason: str) -> None:
    """The answers as files; `reason` is why a line has none."""
    rows = db.execute("SELECT custom_id, failed, answer FROM lines WHERE batch = ? ORDER BY number", (batch["id"],)).fetchall()
    life = files.life(batch.get("output_expires_after"), "output_expires_after")
    parts: dict[bool, list[str]] = {False: [], True: []}
    for custom_id, failed, answer in rows:
        parts[failed != 0].append(answer or unanswered(custom_id, reason))
    for failed, name in ((False, "output"), (True, "error")):
        if parts[failed]:
            content = ("\n".join(parts[failed]) + "\n").encode()
            batch[f"{name}_file_id"] = files.add(db, f"{batch['id']}_{name}.jsonl", "batch_output", content, life)["id"]


def unanswered(custom_id: str, reason: str, message: str = "the batch ended before this request was begun") -> str:
    """The line of a request that has no answer."""
    error = {"code": reason, "message": message}
    return json.dumps({"id": new_id("batch_req"), "custom_id": custom_id, "response": None, "error": error})
