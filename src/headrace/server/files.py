"""/v1/files: what batches read and write. A file past its time is not there any more, and is deleted at the next `sweep`."""

import sqlite3
from typing import Any

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from headrace.server.answers import new_id, now
from headrace.server.errors import ApiError, bad
from headrace.server.settings import Limits
from headrace.server.store import Store, listing

PURPOSES = ("batch", "user_data", "assistants", "evals", "fine-tune", "vision")  # of uploads; only batches are read here
FIELDS = ("purpose", "file", "expires_after[anchor]", "expires_after[seconds]")
SECONDS = (3600, 2592000)  # of a file's life
INPUT_SECONDS = SECONDS[1]  # of a batch's input, where the upload names none
COLUMNS = "id, created, filename, purpose, bytes, expires"


async def upload(store: Store, request: Request, limits: Limits) -> dict[str, Any]:
    """Keep a file. Raises ApiError."""
    try:
        form = await request.form(max_files=1, max_fields=len(FIELDS))
    except (HTTPException, AssertionError):
        raise bad("the body is no multipart form of one file; send purpose and file") from None
    try:
        if unknown := [name for name in form if name not in FIELDS]:
            raise ApiError(400, f"unknown field {unknown[0][:100]!r}; remove it", param=unknown[0][:100], code="unknown_field")
        purpose, file = form.get("purpose"), form.get("file")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "file is missing; give it", param="file", code="missing_field")
        if purpose not in PURPOSES:
            raise bad(f"purpose must be one of {', '.join(PURPOSES)}", "purpose")
        life = _life(form.get("expires_after[anchor]"), form.get("expires_after[seconds]"))
        life = INPUT_SECONDS if life is None and purpose == "batch" else life
        content = await file.read()
        if not content:
            raise bad("the file is empty; send what it should hold", "file")
        name = (file.filename or "file").replace("\\", "/").rpartition("/")[2][:200] or "file"
        return await store.run(lambda db: add(db, name, str(purpose), content, life, limits.stored))
    finally:
        await form.close()


def _life(anchor: Any, seconds: Any) -> int | None:
    if anchor is None and seconds is None:
        return None
    if not isinstance(seconds, str) or not (seconds.isascii() and seconds.isdigit()) or len(seconds) > 9:
        raise bad("expires_after has the anchor created_at, and seconds", "expires_after")
    return life({"anchor": anchor, "seconds": int(seconds)}, "expires_after")


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


def sweep(db: sqlite3.Connection) -> None:
    """Delete the files whose time is over."""
    db.execute("DELETE FROM files WHERE expires <= ?", (now(),))


def add(
    db: sqlite3.Connection, name: str, purpose: str, content: bytes, life: int | None = None, most: int | None = None
) -> dict[str, Any]:
    """Keep a file for `life` seconds; `most`: bytes that all files may have together. Raises ApiError."""
    sweep(db)
    if most is not None:
        check_room(db, len(content), most)
    created = now()
    row = (new_id("file"), created, name, purpose, len(content), None if life is None else created + life)
    db.execute(f"INSERT INTO files ({COLUMNS}, content) VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, content))
    return _object(row)


def check_room(db: sqlite3.Connection, more: int, most: int) -> None:
    """Whether files and the requests of open batches may take so many bytes more. Raises ApiError."""
    sums = "SELECT (SELECT coalesce(sum(bytes), 0) FROM files) + (SELECT coalesce(sum(bytes), 0) FROM batches)"
    (held,) = db.execute(sums).fetchone()
    if held + more > most:
        raise ApiError(400, f"the server keeps {most} bytes of files and is full; delete some", code="storage_full")


async def listed(store: Store, purpose: str | None, after: str | None, limit: int, order: str) -> dict[str, Any]:
    where = " WHERE (expires IS NULL OR expires > ?)" + (" AND purpose = ?" if purpose is not None else "")
    direction = "ASC" if order == "asc" else "DESC"
    query = f"SELECT {COLUMNS} FROM files{where} ORDER BY created {direction}, rowid {direction}"
    given = (now(),) if purpose is None else (now(), purpose)
    rows = await store.run(lambda db: db.execute(query, given).fetchall())
    return listing([_object(row) for row in rows], after, limit)


async def find(store: Store, name: str) -> dict[str, Any]:
    return await store.run(lambda db: _object(row_of(db, name)))


async def content(store: Store, name: str) -> bytes:
    return await store.run(lambda db: read(db, name))


async def delete(store: Store, name: str) -> dict[str, Any]:
    def work(db: sqlite3.Connection) -> None:
        row_of(db, name)
        db.execute("DELETE FROM files WHERE id = ?", (name,))

    await store.run(work)
    return {"id": name, "object": "file", "deleted": True}


def row_of(db: sqlite3.Connection, name: str, param: str | None = None) -> tuple[Any, ...]:
    """Raises ApiError where there is no such file."""
    row: tuple[Any, ...] | None = db.execute(f"SELECT {COLUMNS} FROM files WHERE id = ?", (name,)).fetchone()
    if row is None or (row[5] is not None and row[5] <= now()):
        raise ApiError(404, f"there is no file {name[:100]!r}", param=param, code="file_not_found")
    return row


def read(db: sqlite3.Connection, name: str, param: str | None = None) -> bytes:
    """A file's bytes. Raises ApiError, which says what field (`param`) has named the file."""
    row_of(db, name, param)
    (data,) = db.execute("SELECT content FROM files WHERE id = ?", (name,)).fetchone()
    return bytes(data)


def _object(row: tuple[Any, ...]) -> dict[str, Any]:
    name, created, filename, purpose, size, expires = row
    return {
        "id": name, "object": "file", "bytes": size, "created_at": created, "expires_at": expires,
        "filename": filename, "purpose": purpose, "status": "processed",
    }  # fmt: skip
