"""The batch worker: lines that always fail, batches that end early, and a worker or server that crashes."""

import asyncio
import json
import sqlite3
from typing import Any

import pytest

from headrace.server.access.principals import ANONYMOUS
from headrace.server.http.api_error import MODEL_UNUSABLE
from headrace.server.http.errors import ENGINE_LOST, QUARANTINED
from headrace.server.protocols.openai_types import now
from headrace.server.settings import Limits
from headrace.server.storage import batch_rows, batches
from headrace.server.storage.batch_worker import MAX_RUNNING, BatchWorker
from headrace.server.storage.store import Store
from tests.server.batching import Fragile, answering, come, ended, keep, lines, make, of, run, through, working, written

pytestmark = pytest.mark.usefixtures("quick")


def test_a_line_that_kills_the_engine_is_tried_three_times_and_others_complete() -> None:
    async def test() -> None:
        app, store = Fragile(), Store()
        prompts = [f"p{at}" for at in range(40)]
        prompts[5] = "poison"
        batch, (good, bad) = await through(app, store, prompts, Limits())
        assert batch["status"] == "completed"
        assert [row["response"]["body"]["said"] for row in good] == [one for one in prompts if one != "poison"]
        (line,) = bad
        assert (line["custom_id"], line["response"], line["error"]["code"]) == ("r5", None, ENGINE_LOST)
        assert "tried 3 times" in line["error"]["message"]
        assert app.deaths == app.begun.count("poison") == 3
        assert app.most == MAX_RUNNING  # lines run together
        assert app.beside[0] > 0
        assert app.beside[1:] == [0, 0]  # alone, the second and the third time
        assert max(map(app.begun.count, prompts)) == 3
        assert max(app.begun.count(one) for one in prompts if one != "poison") == 2
        store.close()

    run(test())


def test_a_quarantined_line_is_an_error_line() -> None:
    """As the server itself remembers what the engine ended under, a third try ends no engine."""

    async def test() -> None:
        fragile, store = Fragile(), Store()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            message = await receive()
            if fragile.deaths == 2 and json.loads(message["body"])["prompt"] == "poison":
                await answering(0, 422, QUARANTINED)(scope, lambda: asyncio.sleep(0, message), send)
            else:
                await fragile(scope, lambda: asyncio.sleep(0, message), send)

        batch, (good, bad) = await through(app, store, [*(f"p{at}" for at in range(20)), "poison"], Limits())
        assert (batch["status"], len(good), fragile.deaths) == ("completed", 20, 2)
        assert [(row["response"]["status_code"], row["response"]["body"]["error"]["code"]) for row in bad] == [
            (422, QUARANTINED)
        ]
        store.close()

    run(test())


def test_a_line_that_kills_the_server_is_tried_three_times() -> None:
    """What is under way when a server ends without a word: none of it is lost, all of it is suspect, and then runs alone."""

    async def test() -> None:
        store = Store()
        name = await make(store, of(40))
        for attempt in range(3):  # a server that ends under what it begins
            rows = await store.run(lambda db: batch_rows.start_rows(db, MAX_RUNNING, True, {ANONYMOUS: 0}))
            if attempt == 0:
                assert len(rows) == MAX_RUNNING
                for row in rows[1:]:  # only the first was the poison; the others are answered the next time
                    await store.run(lambda db, row=row: batch_rows.finish_row(db, row.number, b"{}", failed=False))  # type: ignore[misc]
            else:
                fresh = [row for row in rows if row.attempts == 0]
                for row in fresh:
                    await store.run(lambda db, row=row: batch_rows.finish_row(db, row.number, b"{}", failed=False))  # type: ignore[misc]
                if fresh:
                    rows = await store.run(lambda db: batch_rows.start_rows(db, MAX_RUNNING, True, {ANONYMOUS: 0}))
                assert [(row.custom_id, row.attempts) for row in rows] == [("r0", attempt)]
            await store.run(batch_rows.recover)
        batch = await batches.find(store, name)
        assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 40, "completed": 39, "failed": 1})
        ((line,),) = (await written(store, batch))[1:]
        assert (line["custom_id"], line["error"]["code"]) == ("r0", "server_lost")
        store.close()

    run(test())


def test_an_orderly_end_counts_no_try() -> None:
    async def test() -> None:
        store = Store()
        name = await make(store, of(40))
        asked: list[Any] = []

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            asked.append(1)
            await asyncio.Event().wait()

        async with working(slow, store):
            await come(lambda: len(asked) == MAX_RUNNING)
        found = await store.read(lambda db: db.execute("SELECT state, attempts, count(*) FROM rows GROUP BY 1, 2").fetchall())
        assert found == [("pending", 0, 40)]
        async with working(answering(), store):
            assert (await ended(store, name))["request_counts"]["completed"] == 40
        store.close()

    run(test())


@pytest.mark.parametrize("kind", ["says nothing", "answers too much", "is no JSON"])
def test_a_line_without_a_storable_answer_is_an_error_line(kind: str) -> None:
    """An application that ends without an answer, an answer that the database does not hold, a refusal that is no refusal."""

    async def test() -> None:
        store = Store()
        store.writer.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 20_000)
        tries = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal tries
            message = await receive()
            if json.loads(message["body"])["prompt"] != "poison":
                await answering()(scope, lambda: asyncio.sleep(0, message), send)
                return
            tries += 1
            if kind == "says nothing":
                raise RuntimeError("a mistake")
            refused = kind == "is no JSON"
            await send({"type": "http.response.start", "status": 503 if refused else 200, "headers": []})
            body = b"<html>" if refused else json.dumps({"said": "x" * 30_000}).encode()
            await send({"type": "http.response.body", "body": body})

        prompts = ["poison", *(f"p{at}" for at in range(40))]
        batch, (good, bad) = await through(app, store, prompts, Limits())
        assert (batch["status"], len(good), len(bad), tries) == ("completed", 40, 1, 3)
        assert (bad[0]["custom_id"], bad[0]["error"]["code"]) == ("r0", "line_failed")
        store.close()

    run(test())


def test_a_model_that_cannot_be_used_is_an_answer_and_a_busy_server_is_not() -> None:
    async def test() -> None:
        store, asked = Store(), []  # type: ignore[var-annotated]
        batch, (good, bad) = await through(answering(0, 503, MODEL_UNUSABLE, asked), store, ["a", "b"], Limits())
        assert (batch["status"], good, len(bad), len(asked)) == ("completed", [], 2, 2)
        assert {row["response"]["status_code"] for row in bad} == {503}
        asked.clear()
        name = await make(store, of(2))
        async with working(answering(0, 503, "engine_unavailable", asked), store):
            await come(lambda: len(asked) > 20)
            assert (await batches.find(store, name))["status"] == "in_progress"
            await store.run(lambda db: db.execute("UPDATE batches SET expires_at = 1 WHERE id = ?", (name,)))
            batch = await ended(store, name)
        assert (batch["status"], batch["request_counts"]["failed"]) == ("expired", 2)
        assert {row["error"]["code"] for row in (await written(store, batch))[1]} == {"batch_expired"}
        store.close()

    run(test())


def test_a_busy_server_doubles_the_retry_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.storage.batch_worker.RETRY_SECONDS", (0.25, 8.0))
    paused: list[float] = []

    async def pause(self: BatchWorker, seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr(BatchWorker, "_pause", pause)

    async def test() -> None:
        store, asked = Store(), []  # type: ignore[var-annotated]
        await make(store, of(1))
        async with working(answering(0, 429, "rate_limit_exceeded", asked), store):
            await come(lambda: len(asked) > 8)
        assert paused[:8] == [0.25, 0.5, 1, 2, 4, 8, 8, 8]
        store.close()

    run(test())


def test_a_shutdown_does_not_wait_for_paused_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.storage.batch_worker.RETRY_SECONDS", (3600.0, 3600.0))

    async def test() -> None:
        store, asked = Store(), []  # type: ignore[var-annotated]
        await make(store, of(1))
        async with working(answering(0, 429, "rate_limit_exceeded", asked), store) as worker:
            await come(lambda: asked)
            await worker.stop()
            await worker.finish_rows()
        store.close()

    run(test())


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_line_refused_by_a_busy_server_ends_with_its_batch(how: str) -> None:
    """It waits as long as its batch is open, and no attempt is counted."""

    async def test() -> None:
        store, asked = Store(), []  # type: ignore[var-annotated]
        name = await make(store, of(700))  # more than are dropped at once
        async with working(answering(0, 503, "no_room", asked), store) as worker:
            await come(lambda: len(asked) >= 3 * MAX_RUNNING)
            if how == "cancelled":
                assert (await batches.cancel(store, name))["status"] == "cancelling"
            else:
                await store.run(lambda db: db.execute("UPDATE batches SET expires_at = 1 WHERE id = ?", (name,)))
            worker.wake()
            batch = await ended(store, name)
        good, bad = await written(store, batch)
        assert (batch["status"], good, len(bad)) == (how, [], 700)
        assert {row["error"]["code"] for row in bad} == {f"batch_{how}"}
        store.close()

    run(test())


def test_a_batch_expires_without_requests() -> None:
    """Nothing happens but that time goes by: what has not begun is dropped, what is under way is waited for."""

    async def test() -> None:
        store, go_on = Store(), asyncio.Event()
        name, begun = await make(store, of(3)), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await go_on.wait()
            await answering()(scope, receive, send)

        worker = BatchWorker(slow, store, 1 << 30, width=1)
        worker.begin()
        await begun.wait()  # before there is an end, which on a slow machine would come first
        await store.run(lambda db: db.execute("UPDATE batches SET expires_at = ? WHERE id = ?", (now() + 1, name)))
        worker.wake()  # from now on it waits for that time
        while (found := await batches.find(store, name))["request_counts"]["failed"] < 2:
            await asyncio.sleep(0.01)
        assert found["status"] == "finalizing"
        go_on.set()
        found = await ended(store, name)
        assert (found["status"], found["request_counts"]["completed"]) == ("expired", 1)
        await worker.close()
        store.close()

    run(test())


def test_a_worker_reports_a_failure_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        store, failing = Store(), True
        begin = batch_rows.start_rows

        def fails(*arguments: Any) -> Any:
            if failing:
                raise MemoryError
            return begin(*arguments)

        monkeypatch.setattr(batch_rows, "start_rows", fails)
        name = await make(store, of(3))
        async with working(answering(), store) as worker:
            await come(lambda: worker.trouble)
            assert "see the server's log" in worker.trouble
            failing = False
            assert (await ended(store, name))["status"] == "completed"
            await come(lambda: worker.trouble == "")
            worker._task.cancel()  # type: ignore[union-attr]  # what ends it for good
            await come(lambda: worker.trouble)
            assert "the batch worker ended" in worker.trouble
        assert worker.trouble == ""  # in an orderly end it has, and that is as it should be
        store.close()

    run(test())


def test_batch_lines_of_responses_are_not_stored_by_default() -> None:
    async def test() -> None:
        store, asked = Store(), []  # type: ignore[var-annotated]
        url = "/v1/responses"
        name = await make(
            store, lines([{"model": "m", "input": "a"}, {"model": "m", "input": "a", "store": True}], url), url=url
        )
        async with working(answering(asked=asked), store):
            await ended(store, name)
        assert [one["store"] for one in asked] == [False, True]
        assert {one["priority"] for one in asked} == {1_000_000}
        store.close()

    run(test())


def test_a_waiting_worker_sweeps() -> None:
    """When nothing is to be done the files whose time is over are deleted."""

    async def test() -> None:
        store = Store()
        await store.run(lambda db: keep(db, "a", b"x", -1))
        async with working(None, store):
            while await store.read(lambda db: db.execute("SELECT count(*) FROM files").fetchone()[0]):
                await asyncio.sleep(0.01)
        store.close()

    run(test())
