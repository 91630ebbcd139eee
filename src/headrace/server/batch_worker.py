"""The worker that answers the lines of batches, behind the requests of people who wait.

A line goes through the same application as a request from outside. Its answer is kept in one transaction; a line whose answer
was not kept when the server ended is run again after the next start, so that every line is answered exactly once.
"""

import asyncio
import contextlib
import json
import logging
import sqlite3
from collections.abc import MutableMapping
from typing import Any

from headrace.server import batches, files
from headrace.server.answers import new_id, now
from headrace.server.errors import ENGINE_LOST
from headrace.server.guard import App
from headrace.server.store import Store

log = logging.getLogger("headrace.server")

WIDTH = 32  # lines under way at once
SWEEP = 600.0  # seconds between looks for files whose time is over
PATIENCE = 0.25  # seconds before a line is tried again that found the server busy or the engine down
ATTEMPTS = 3  # of a line under which the engine ends
BUSY = (429, 503)
BEHIND = 1_000_000  # the priority of lines that name none: after those that somebody waits for
WITH_PRIORITY = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


class BatchWorker:
    """`begin` goes on with what an earlier server left; `poke` says that there is something new."""

    def __init__(self, app: App, store: Store, most: int, width: int = WIDTH) -> None:
        self._app = app
        self._store = store
        self._most = most  # bytes of all files
        self._width = width
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._lines: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._alone = False  # the one line under way is one under which the engine has ended before

    def begin(self) -> None:
        self._task = asyncio.create_task(self._run())

    def poke(self) -> None:
        self._news.set()

    async def stop(self) -> None:
        """Begin no more lines."""
        self._stopping = True
        self.poke()

    async def close(self) -> None:
        """End; lines under way are given up, and run again after the next start."""
        tasks = [task for task in (self._task, *self._lines.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def settle(self) -> None:
        """Wait for the lines under way."""
        await asyncio.gather(*self._lines.values(), return_exceptions=True)

    async def _run(self) -> None:
        while not self._stopping:
            self._news.clear()
            try:
                if not await self._feed():
                    await self._wait()
            except Exception:  # the database's, or the memory's
                log.exception("the server's database failed; batches wait")
                await asyncio.sleep(40 * PATIENCE)

    async def _wait(self) -> None:
        """Until there is something new; files whose time is over are deleted meanwhile."""
        while not self._news.is_set():
            await self._store.run(files.sweep)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), SWEEP)

    async def _feed(self) -> bool:
        """Begin lines while there is room, and end batches that are through; returns whether to look again at once."""
        running = set(self._lines)
        room = 0 if self._alone else self._width - len(running)
        todo, ended = await self._store.run(lambda db: _next(db, running, room, self._most))
        for batch, number, url, custom_id, body, attempts in todo:
            if self._stopping:
                break
            self._alone = attempts > 0
            task = asyncio.create_task(self._line((batch, number), url, custom_id, body))
            self._lines[batch, number] = task
        for name, status in ended:
            log.info("batch %s is %s", name, status)
        return bool(ended)

    async def _line(self, key: tuple[str, int], url: str, custom_id: str, body: str) -> None:
        try:
            status, answer = await self._ask(url, body)
            while status in BUSY and not _lost(answer):
                await asyncio.sleep(PATIENCE)
                if self._stopping or not await self._store.run(lambda db: batches.is_open(db, key[0])):
                    return
                status, answer = await self._ask(url, body)
            if status in BUSY:
                await self._store.run(lambda db: _strike(db, key, custom_id))
                return
            response = {"status_code": status, "request_id": new_id("req"), "body": json.loads(answer)}
            line = json.dumps({"id": new_id("batch_req"), "custom_id": custom_id, "response": response, "error": None})
            await self._store.run(lambda db: _answer(db, key, line, failed=status != 200))
        except Exception:  # of the database: the line is run again
            log.exception("the answer of a line of a batch was not kept")
            await asyncio.sleep(40 * PATIENCE)
        finally:
            del self._lines[key]
            self._alone = False
            self.poke()

    async def _ask(self, url: str, body: str) -> tuple[int, bytes]:
        """Status and body of one request through the application."""
        asked = json.loads(body)
        if url in WITH_PRIORITY:
            asked.setdefault("priority", BEHIND)
        sent: list[MutableMapping[str, Any]] = []
        given = [{"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}]

        async def receive() -> MutableMapping[str, Any]:
            if given:
                return given.pop()
            await asyncio.Event().wait()  # nobody goes away
            raise AssertionError

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        try:
            await self._app(_scope(url), receive, send)
        except Exception:  # after an answer that says so
            log.exception("a line of a batch met a mistake of the server")
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def _scope(url: str) -> MutableMapping[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": url,
        "raw_path": url.encode(), "query_string": b"", "root_path": "", "headers": [(b"content-type", b"application/json")],
        "client": None, "server": None, "state": {},
    }  # fmt: skip


def _lost(answer: bytes) -> bool:
    """Whether the engine ended while it had the request."""
    return bool(json.loads(answer)["error"]["code"] == ENGINE_LOST)


def _answer(db: sqlite3.Connection, key: tuple[str, int], line: str, *, failed: bool) -> None:
    db.execute(
        "UPDATE lines SET answer = ?, failed = ?, body = NULL WHERE batch = ? AND number = ? AND answer IS NULL",
        (line, int(failed), *key),
    )


def _strike(db: sqlite3.Connection, key: tuple[str, int], custom_id: str) -> None:
    """The engine has ended under a line, which may be why; after ATTEMPTS times that is its answer."""
    db.execute("UPDATE lines SET attempts = attempts + 1 WHERE batch = ? AND number = ?", key)
    (attempts,) = db.execute("SELECT attempts FROM lines WHERE batch = ? AND number = ?", key).fetchone()
    if attempts >= ATTEMPTS:
        message = f"the engine ended {attempts} times while it had this request; the server's log says how"
        _answer(db, key, batches.unanswered(custom_id, ENGINE_LOST, message), failed=True)


Line = tuple[str, int, str, str, str, int]


def _next(
    db: sqlite3.Connection, running: set[tuple[str, int]], room: int, most: int
) -> tuple[list[Line], list[tuple[str, str]]]:
    """Lines to begin, oldest batch first, and the batches that have just ended. Lines under which the engine has ended come
    last and alone: so it shows which of them it was, and it takes no other along."""
    lines: list[Line] = []
    suspects: list[Line] = []
    ended: list[tuple[str, str]] = []
    rows = db.execute("SELECT id FROM batches WHERE status IN (?, ?) ORDER BY number", batches.OPEN).fetchall()
    for (name,) in rows:
        batch = batches.load(db, name)
        mine = {number for owner, number in running if owner == name}
        stopped = "cancelled" if batch["status"] == "cancelling" else "expired" if batch["expires_at"] <= now() else ""
        fresh = _left(db, batch, mine, "attempts = 0", room + len(mine) + 1)
        tried = _left(db, batch, mine, "attempts > 0", 1 + len(mine))
        if (stopped or not (fresh or tried)) and not mine:
            ended.append((name, batches.finish(db, batch, stopped or "completed", most)))
        elif not stopped:
            lines += fresh[: room - len(lines)]
            suspects += tried
    return lines or ([] if running or not room else suspects[:1]), ended


def _left(db: sqlite3.Connection, batch: dict[str, Any], mine: set[int], which: str, most: int) -> list[Line]:
    """Lines that have no answer and are not under way."""
    query = f"SELECT number, custom_id, body, attempts FROM lines WHERE batch = ? AND answer IS NULL AND {which}"
    rows = db.execute(f"{query} ORDER BY number LIMIT ?", (batch["id"], most)).fetchall()
    return [(batch["id"], row[0], batch["endpoint"], *row[1:]) for row in rows if row[0] not in mine]
