"""A batch's input: a file of requests, one a line, read line by line."""

import sqlite3
from typing import Any

import msgspec

from headrace.server import files
from headrace.server.errors import ApiError
from headrace.server.reading import read_json
from headrace.server.settings import Limits
from headrace.server.store_schema import ROW

MAX_ERRORS = 20  # that a failed batch tells of


def add_rows(
    db: sqlite3.Connection, batch: int, file: files.File, endpoint: str, limits: Limits
) -> tuple[int, int, list[dict[str, Any]]]:
    """Make a batch's rows of a file's lines. Returns how many, the bytes that they count for, and what is wrong, by line; where
    something is, no row is left."""
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    size = 0
    for number, line in enumerate(files.lines(db, file, limits.body), 1):
        if not (text := line.strip()):
            continue
        problem, custom_id, body = _read_line(text, endpoint, limits.body)
        if not problem and custom_id in seen:
            problem = f"custom_id {custom_id[:60]!r} is used twice"
        seen.add(custom_id)
        if len(seen) > limits.batch_lines:
            errors = [_wrong("too_many_requests", f"there are more than {limits.batch_lines} lines; split the file", None)]
            break
        if problem:
            errors.append(_wrong("invalid_line", problem, number))
            if len(errors) == MAX_ERRORS:
                break
        if not errors:
            size += len(body) + ROW
            row = (batch, custom_id, body)
            db.execute("INSERT INTO rows (batch, custom_id, state, body) VALUES (?, ?, 'pending', ?)", row)
    if not seen:
        errors = [_wrong("empty_file", "the file has no lines", None)]
    if errors:
        db.execute("DELETE FROM rows WHERE batch = ?", (batch,))
        return 0, 0, errors
    return len(seen), size, []


def _read_line(line: bytes, endpoint: str, longest: int) -> tuple[str, str, bytes]:
    """What is wrong with a line (empty: nothing), its custom_id, its body."""
    if len(line) > longest:
        return f"it has more than {longest} bytes", "", b""
    try:
        data = read_json(line)
    except ApiError as error:
        return error.message.replace("the body", "it", 1), "", b""
    except (msgspec.DecodeError, RecursionError):
        return "it is not JSON", "", b""
    if not isinstance(data, dict):
        return "it is not a JSON object", "", b""
    custom_id, body = data.get("custom_id"), data.get("body")
    if not isinstance(custom_id, str) or not custom_id or len(custom_id) > 512:
        return "custom_id must be text of 1 to 512 characters", "", b""
    if unknown := sorted(set(data) - {"custom_id", "method", "url", "body"}):
        return f"unknown field {unknown[0][:60]!r}", custom_id, b""
    if data.get("method", "POST") != "POST" or data.get("url") != endpoint:
        return f"method and url must be POST {endpoint}, the batch's endpoint", custom_id, b""
    if not isinstance(body, dict):
        return "body must be a JSON object", custom_id, b""
    if body.get("stream"):
        return "stream has no meaning in a batch; leave it out", custom_id, b""
    return "", custom_id, msgspec.json.encode(body)


def _wrong(code: str, message: str, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": None}
