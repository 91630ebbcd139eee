"""The worker that answers the lines of batches, behind the requests of people who wait.

A line goes through the same application as a request from outside. Its answer is kept in one transaction; a line whose answer
was not kept when the server ended is run again after the next start, so that every line is answered exactly once.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, MutableMapping
from typing import Any

import msgspec

from headrace.confined.pool import CLIENT
from headrace.server.access.principals import PRINCIPAL, Principal
from headrace.server.http.api_error import MODEL_UNUSABLE, ApiError
from headrace.server.http.errors import ENGINE_LOST
from headrace.server.http.guard import App
from headrace.server.http.ids import new_id, now
from headrace.server.storage import batch_rows, files
from headrace.server.storage.batch_rows import Row
from headrace.server.storage.store import StorageError, Store

log = logging.getLogger("headrace.server")

WIDTH = 32  # lines under way at once
SWEEP = 600.0  # seconds between looks for files whose time is over
PAUSES = (0.25, 8.0)  # seconds before what found the server busy, or the disk full, is tried again: first, and in the end
BUSY = (429, 503)
BEHIND = 1_000_000  # the priority of lines that name none: after those that somebody waits for
DEFAULTS = {"priority": BEHIND}
OF_ENDPOINT = {"/v1/responses": {"store": False}}  # a batch does not push out the conversations of people
Outcome = Callable[[sqlite3.Connection], None]  # a transaction in which a line's state becomes another


class _Reason(msgspec.Struct):
    code: str | None = None


class _Refusal(msgspec.Struct):
    error: _Reason


class BatchWorker:
    """`begin` goes on with what an earlier server left; `poke` says that there is something new."""

    def __init__(
        self, app: App, store: Store, most: int, named: Callable[[str], Principal | None] = Principal, width: int = WIDTH
    ) -> None:
        self._app = app
        self._named = named  # the owners of batches; None: there is none of this name any more
        self._store = store
        self._most = most  # bytes of all batches
        self._width = width
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._recovered = False
        self._swept = -SWEEP
        self._lines: dict[int, asyncio.Task[None]] = {}
        self._running: Counter[str] = Counter()  # lines under way by owner
        self._alone = False  # the one line under way is one that was tried before
        self._troubles: dict[int | None, str] = {}  # what keeps lines, and the worker itself (None), from going on

    def begin(self) -> None:
        self._task = asyncio.create_task(self._run())

    def poke(self) -> None:
        self._news.set()

    @property
    def trouble(self) -> str:
        """Why batches do not go on: one line; empty where they do."""
        if self._task is not None and self._task.done() and not self._stopped.is_set():
            return "their worker has ended; start the server again; its log says why"
        return next(iter(self._troubles.values()), "")

    async def stop(self) -> None:
        """Begin no more lines."""
        self._stopped.set()
        self.poke()

    async def close(self) -> None:
        """End; lines under way are given up, and run again after the next start."""
        self._stopped.set()
        tasks = [task for task in (self._task, *self._lines.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(StorageError):  # the next server finds them under way, and counts a try
            await self._store.run(batch_rows.give_back)

    async def settle(self) -> None:
        """Wait for the lines under way."""
        await asyncio.gather(*self._lines.values(), return_exceptions=True)

    async def _run(self) -> None:
        pause = PAUSES[0]
        while not self._stopped.is_set():
            try:
                await self._turn()
                self._troubles.pop(None, None)
                pause = PAUSES[0]
            except Exception as error:  # the database's, the memory's, a mistake of ours: none of them ends the worker
                self._wait_for(None, error)
                await self._pause(pause)
                pause = min(2 * pause, PAUSES[1])

    async def _turn(self) -> None:
        """End what is cancelled or past its time, begin lines while there is room, and wait until there is something new."""
        self._news.clear()
        if not self._recovered:
            await self._store.run(batch_rows.recover)
            self._recovered = True
        more = await self._store.run(batch_rows.stop)
        patience = await self._begin_lines()
        if time.monotonic() >= self._swept + SWEEP:
            self._swept = time.monotonic()
            await self._store.run(files.sweep)
            while await self._store.run(files.shrink):
                pass
        if not more:
            expiry = await self._store.read(batch_rows.next_expiry)
            seconds = min(patience, SWEEP if expiry is None else max(expiry - now(), 0))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), seconds)

    async def _begin_lines(self) -> float:
        """Begin lines while there is room, of those owners who have something left of their quotas; returns the seconds until
        another has, SWEEP at most."""
        room = 0 if self._alone or self._stopped.is_set() else self._width - len(self._lines)
        if not room:
            return SWEEP
        alone, patience = not self._lines, SWEEP
        running: dict[str, int] = {}
        for owner in await self._store.read(batch_rows.owners):
            seconds = who.seconds_until_free if (who := self._named(owner)) is not None else 0
            if seconds:
                patience = min(patience, seconds)
            else:
                running[owner] = self._running[owner]
        for row in await self._store.run(lambda db: batch_rows.begin(db, room, alone, running)) if running else []:
            if (who := self._named(row.owner)) is not None:
                who.use("requests", 1)
            self._alone = row.attempts > 0
            self._running[row.owner] += 1
            self._lines[row.number] = asyncio.create_task(self._line(row))
        return patience

    async def _line(self, row: Row) -> None:
        """Answer a line, and keep the answer; both are tried until they succeed or the batch ends."""
        outcome: Outcome | None = None
        pause = 0.0
        try:
            while not self._stopped.is_set():
                try:
                    if pause and not await self._store.read(lambda db: batch_rows.is_open(db, row.number)):
                        outcome = lambda db: batch_rows.move_row(db, row.number, "return")  # noqa: E731
                    outcome = outcome or await self._outcome(row)
                    if outcome is not None:
                        return await self._store.run(outcome)
                except ApiError as error:  # no room for the answer, or the database cannot be written: it waits
                    self._wait_for(row.number, error)
                except Exception as error:
                    log.exception("a line of a batch failed")
                    reason = f"the server failed with this request ({type(error).__name__})"
                    outcome = _lost(row, "line_failed", reason)
                pause = min(2 * pause, PAUSES[1]) or PAUSES[0]
                await self._pause(pause)
        finally:
            del self._lines[row.number]
            self._running[row.owner] -= 1
            self._troubles.pop(row.number, None)
            self._alone = False
            self.poke()

    async def _outcome(self, row: Row) -> Outcome | None:
        """What becomes of a line now that it has been asked; None: the server is busy, and it is to be asked again."""
        if (who := self._named(row.owner)) is None:
            gone = batch_rows.unanswered(row.number, row.custom_id, "key_removed", "the key of this batch's owner was removed")
            return lambda db: batch_rows.settle(db, row.number, gone, failed=True)
        status, answer = await self._ask(row, who)
        if status in BUSY:
            code = msgspec.json.decode(answer, type=_Refusal).error.code
            if code == ENGINE_LOST:
                return _lost(row, ENGINE_LOST, "the engine ended while it had this request")
            if code != MODEL_UNUSABLE:
                return None
        response = {"status_code": status, "request_id": new_id("req"), "body": msgspec.Raw(answer)}
        line = batch_rows.line(row.number, row.custom_id, response)
        return lambda db: batch_rows.settle(db, row.number, line, failed=status != 200, most=self._most, who=who)

    async def _ask(self, row: Row, who: Principal) -> tuple[int, bytes]:
        """Status and body of one request through the application, as if its owner had asked."""
        PRINCIPAL.set(who)
        CLIENT.set("" if who.alone else who.name)
        body = DEFAULTS | OF_ENDPOINT.get(row.url, {}) | msgspec.json.decode(row.body)
        sent: list[MutableMapping[str, Any]] = []
        given = [{"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}]

        async def receive() -> MutableMapping[str, Any]:
            if given:
                return given.pop()
            await asyncio.Event().wait()  # nobody goes away
            raise AssertionError

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        try:
            await self._app(_scope(row.url), receive, send)
        except Exception:
            if not sent:
                raise
            log.exception("a line of a batch met a mistake of the server")  # after an answer that says so
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    async def _pause(self, seconds: float) -> None:
        """Until the time is over, or the server ends."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)

    def _wait_for(self, who: int | None, error: Exception) -> None:
        """Say once that something does not go on, and why."""
        if not self._troubles:
            log.error("batches wait: %s", error, exc_info=None if isinstance(error, ApiError) else error)
        known = error.message if isinstance(error, ApiError) else "the server failed; its log says how"
        self._troubles[who] = known


def _lost(row: Row, code: str, reason: str) -> Outcome:
    return lambda db: batch_rows.lose(db, row.number, code, reason)


def _scope(url: str) -> MutableMapping[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": url,
        "raw_path": url.encode(), "query_string": b"", "root_path": "", "headers": [(b"content-type", b"application/json")],
        "client": None, "server": None, "state": {},
    }  # fmt: skip
