"""Worker that runs the rows of batches at a lower priority than the requests of clients.

A row goes through the same application as a client's request. One transaction stores its answer. If the server ends before
that, the next server runs the row again; so each row gets exactly one answer.
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
from headrace.server.protocols.openai_types import new_id, now
from headrace.server.storage import batch_rows, files
from headrace.server.storage.batch_rows import BatchRow
from headrace.server.storage.store import StorageError, Store

log = logging.getLogger("headrace.server")

# Rows that run at the same time.
MAX_RUNNING = 32
# Between two deletions of expired files.
SWEEP_SECONDS = 600.0
# Before a retry if the server is busy or the disk is full: at first, and at most.
RETRY_SECONDS = (0.25, 8.0)
BUSY_STATUSES = (429, 503)
# Priority of rows that name none: after the requests of clients.
BATCH_PRIORITY = 1_000_000
DEFAULTS = {"priority": BATCH_PRIORITY}
# A batch does not displace the stored conversations of clients.
ENDPOINT_DEFAULTS = {"/v1/responses": {"store": False}}
# A transaction that changes the state of a row.
Outcome = Callable[[sqlite3.Connection], None]


class BatchWorker:
    """Runs pending rows, also those of an earlier server. `wake` announces a new or a cancelled batch."""

    def __init__(
        self, app: App, store: Store, most: int, named: Callable[[str], Principal | None] = Principal, width: int = MAX_RUNNING
    ) -> None:
        self._app = app
        self._named = named  # owner -> principal; None if there is no such principal any more
        self._store = store
        self._most = most  # bytes of all batches
        self._width = width
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._recovered = False
        self._swept = -SWEEP_SECONDS
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by row
        self._running: Counter[str] = Counter()  # running rows by owner
        self._alone = False  # the only running row has failed before
        self._troubles: dict[int | None, str] = {}  # why a row waits, or the worker itself (None)

    def begin(self) -> None:
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        self._news.set()

    @property
    def trouble(self) -> str:
        """Why batches wait, in one line; empty if they do not."""
        if self._task is not None and self._task.done() and not self._stopped.is_set():
            return "the batch worker ended; restart the server, and see its log"
        return next(iter(self._troubles.values()), "")

    async def stop(self) -> None:
        """Start no more rows."""
        self._stopped.set()
        self.wake()

    async def close(self) -> None:
        """End the worker. Running rows are cancelled; the next server runs them again."""
        self._stopped.set()
        tasks = [task for task in (self._task, *self._tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(StorageError):  # the next server recovers them, and counts an attempt
            await self._store.run(batch_rows.return_running)

    async def finish_rows(self) -> None:
        """Wait for the running rows."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self) -> None:
        pause = RETRY_SECONDS[0]
        while not self._stopped.is_set():
            try:
                await self._turn()
                self._troubles.pop(None, None)
                pause = RETRY_SECONDS[0]
            except Exception as error:  # no error ends the worker
                self._wait_for(None, error)
                await self._pause(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])

    async def _turn(self) -> None:
        """Drop rows of ended batches, start rows while there is room, and wait until `wake` or the next expiry."""
        self._news.clear()
        if not self._recovered:
            await self._store.run(batch_rows.recover)
            self._recovered = True
        more = await self._store.run(batch_rows.drop_pending)
        patience = await self._begin_lines()
        if time.monotonic() >= self._swept + SWEEP_SECONDS:
            self._swept = time.monotonic()
            await self._store.run(files.delete_expired)
            while await self._store.run(files.release_pages):
                pass
        if not more:
            expiry = await self._store.read(batch_rows.next_expiry)
            seconds = min(patience, SWEEP_SECONDS if expiry is None else max(expiry - now(), 0))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), seconds)

    async def _begin_lines(self) -> float:
        """Start rows while there is room, of owners within their quotas. Returns the seconds until another owner is within his
        quota, at most SWEEP_SECONDS."""
        room = 0 if self._alone or self._stopped.is_set() else self._width - len(self._tasks)
        if not room:
            return SWEEP_SECONDS
        alone, patience = not self._tasks, SWEEP_SECONDS
        running: dict[str, int] = {}
        for owner in await self._store.read(batch_rows.active_owners):
            seconds = who.seconds_until_free if (who := self._named(owner)) is not None else 0
            if seconds:
                patience = min(patience, seconds)
            else:
                running[owner] = self._running[owner]
        for row in await self._store.run(lambda db: batch_rows.start_rows(db, room, alone, running)) if running else []:
            if (who := self._named(row.owner)) is not None:
                who.use("requests", 1)
            self._alone = row.attempts > 0
            self._running[row.owner] += 1
            self._tasks[row.number] = asyncio.create_task(self._line(row))
        return patience

    async def _line(self, row: BatchRow) -> None:
        """Run a row and store its answer. Retries both until they succeed or the batch ends."""
        outcome: Outcome | None = None
        pause = 0.0
        try:
            while not self._stopped.is_set():
                try:
                    if pause and not await self._store.read(lambda db: batch_rows.is_row_open(db, row.number)):
                        outcome = lambda db: batch_rows.move_row(db, row.number, "return")  # noqa: E731
                    outcome = outcome or await self._outcome(row)
                    if outcome is not None:
                        return await self._store.run(outcome)
                except ApiError as error:  # no room for the answer, or the database cannot be written
                    self._wait_for(row.number, error)
                except Exception as error:
                    log.exception("a line of a batch failed")
                    reason = f"the server failed with this request ({type(error).__name__})"
                    outcome = _failed_attempt(row, "line_failed", reason)
                pause = min(2 * pause, RETRY_SECONDS[1]) or RETRY_SECONDS[0]
                await self._pause(pause)
        finally:
            del self._tasks[row.number]
            self._running[row.owner] -= 1
            self._troubles.pop(row.number, None)
            self._alone = False
            self.wake()

    async def _outcome(self, row: BatchRow) -> Outcome | None:
        """Run a row once. Returns the transaction that ends the attempt; None if the server is busy."""
        if (who := self._named(row.owner)) is None:
            gone = batch_rows.error_line(row.number, row.custom_id, "key_removed", "the key of this batch's owner was removed")
            return lambda db: batch_rows.finish_row(db, row.number, gone, failed=True)
        status, answer = await self._ask(row, who)
        if status in BUSY_STATUSES:
            code = msgspec.json.decode(answer)["error"]["code"]
            if code == ENGINE_LOST:
                return _failed_attempt(row, ENGINE_LOST, "the engine ended while it had this request")
            if code != MODEL_UNUSABLE:
                return None
        response = {"status_code": status, "request_id": new_id("req"), "body": msgspec.Raw(answer)}
        line = batch_rows.output_line(row.number, row.custom_id, response)
        return lambda db: batch_rows.finish_row(db, row.number, line, failed=status != 200, most=self._most, who=who)

    async def _ask(self, row: BatchRow, who: Principal) -> tuple[int, bytes]:
        """Status and body of the answer to one row. Runs in a task of its own, with its owner as the principal."""
        PRINCIPAL.set(who)
        CLIENT.set("" if who.alone else who.name)
        body = DEFAULTS | ENDPOINT_DEFAULTS.get(row.url, {}) | msgspec.json.decode(row.body)
        sent: list[MutableMapping[str, Any]] = []
        requests = [{"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}]

        async def receive() -> MutableMapping[str, Any]:
            if requests:
                return requests.pop()
            await asyncio.Event().wait()  # there is no client to disconnect
            raise AssertionError

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        try:
            await self._app(_scope(row.url), receive, send)
        except Exception:
            if not sent:
                raise
            log.exception("a line of a batch met a mistake of the server")  # after it sent an error answer
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    async def _pause(self, seconds: float) -> None:
        """Sleep, unless the worker stops."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)

    def _wait_for(self, row: int | None, error: Exception) -> None:
        """Record why a row waits, or the worker if `row` is None; log the first such error."""
        if not self._troubles:
            log.error("batches wait: %s", error, exc_info=None if isinstance(error, ApiError) else error)
        message = error.message if isinstance(error, ApiError) else "internal error; see the server's log"
        self._troubles[row] = message


def _failed_attempt(row: BatchRow, code: str, reason: str) -> Outcome:
    return lambda db: batch_rows.fail_attempt(db, row.number, code, reason)


def _scope(url: str) -> MutableMapping[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": url,
        "raw_path": url.encode(), "query_string": b"", "root_path": "", "headers": [(b"content-type", b"application/json")],
        "client": None, "server": None, "state": {},
    }  # fmt: skip
