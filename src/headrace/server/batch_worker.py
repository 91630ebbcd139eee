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
from headrace.server.guard import App
from headrace.server.store import Store

log = logging.getLogger("headrace.server")

WIDTH = 32  # lines under way at once
SWEEP = 600.0  # seconds between looks for files whose time is over
PATIENCE = 0.25  # seconds before a line is tried again that found the server busy or the engine down
BUSY = (429, 503)
BEHIND = 1_000_000  # the priority of lines that name none: after those that somebody waits for
WITH_PRIORITY = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


class BatchWorker:
    """`begin` goes on with what an earlier server left; `poke` says that there is something new."""

    def __init__(self, app: App, store: Store, width: int = WIDTH) -> None:
        self._app = app
        self._store = store
        self._width = width
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._lines: dict[tuple[str, int], asyncio.Task[None]] = {}

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
            except sqlite3.Error:
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
        todo, ended = await self._store.run(lambda db: _next(db, running, self._width - len(running)))
        for batch, number, url, custom_id, body in todo:
            if self._stopping:
                break
            task = asyncio.create_task(self._line((batch, number), url, custom_id, body))
            self._lines[batch, number] = task
        for name, status in ended:
            log.info("batch %s is %s", name, status)
        return bool(ended)

    async def _line(self, key: tuple[str, int], url: str, custom_id: str, body: str) -> None:
        try:
            status, answer = await self._ask(url, body)
            while status in BUSY and not self._stopping:
                await asyncio.sleep(PATIENCE)
                status, answer = await self._ask(url, body)
            if status in BUSY:
                return
            response = {"status_code": status, "request_id": new_id("req"), "body": json.loads(answer)}
            line = json.dumps({"id": new_id("batch_req"), "custom_id": custom_id, "response": response, "error": None})
            await self._store.run(
                lambda db: db.execute(
                    "UPDATE lines SET answer = ?, failed = ?, body = NULL WHERE batch = ? AND number = ? AND answer IS NULL",
                    (line, int(status != 200), *key),
                )
            )
        finally:
            del self._lines[key]
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


Line = tuple[str, int, str, str, str]


def _next(db: sqlite3.Connection, running: set[tuple[str, int]], room: int) -> tuple[list[Line], list[tuple[str, str]]]:
    """Lines to begin, oldest batch first, and the batches that have just ended."""
    lines: list[Line] = []
    ended: list[tuple[str, str]] = []
    rows = db.execute("SELECT id FROM batches WHERE status IN (?, ?) ORDER BY number", batches.OPEN).fetchall()
    for (name,) in rows:
        batch = batches.load(db, name)
        mine = {number for owner, number in running if owner == name}
        stopped = "cancelled" if batch["status"] == "cancelling" else "expired" if batch["expires_at"] <= now() else ""
        query = "SELECT number, custom_id, body FROM lines WHERE batch = ? AND answer IS NULL ORDER BY number LIMIT ?"
        left = [row for row in db.execute(query, (name, room + len(mine) + 1)) if row[0] not in mine]
        if (stopped or not left) and not mine:
            status = stopped or "completed"
            batches.finish(db, batch, status)
            ended.append((name, status))
        elif not stopped:
            more = left[: room - len(lines)]
            lines += [(name, number, batch["endpoint"], custom_id, body) for number, custom_id, body in more]
    return lines, ended
