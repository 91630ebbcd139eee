"""The worker of batches: lines that can never succeed, disks that are full, databases that others hold, and its own death."""

import asyncio
import json
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from headrace.server import batch_rows, batches, files
from headrace.server.batch_worker import WIDTH, BatchWorker
from headrace.server.errors import ENGINE_LOST, MODEL_UNUSABLE, ApiError
from headrace.server.settings import Limits
from headrace.server.store import Store
from tests.server.batching import ASK, Fragile, answering, come, ended, keep, lines, make, run, through, working, written


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.batch_worker.PAUSES", (0.02, 0.05))


def of(count: int) -> bytes:
    return lines([{**ASK, "prompt": f"p{at}"} for at in range(count)])


def test_a_line_that_ends_the_engine_is_tried_three_times_and_ends_only_itself() -> None:
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
        assert app.most == WIDTH  # lines run together
        assert app.beside[0] > 0
        assert app.beside[1:] == [0, 0]  # alone, the second and the third time
        assert max(map(app.begun.count, prompts)) == 3
        assert max(app.begun.count(one) for one in prompts if one != "poison") == 2
        store.close()

    run(test())


def test_a_line_under_which_the_server_ends_is_tried_three_times_too() -> None:
    """What is under way when a server ends without a word: none of it is lost, all of it is suspect, and then runs alone."""

    async def test() -> None:
        store = Store()
        name = await make(store, of(40))
        for attempt in range(3):  # a server that ends under what it begins
            rows = await store.run(lambda db: batch_rows.begin(db, WIDTH, True))
            if attempt == 0:
                assert len(rows) == WIDTH
                for row in rows[1:]:  # only the first was the poison; the others are answered the next time
                    await store.run(lambda db, row=row: batch_rows.settle(db, row.number, b"{}", failed=False))  # type: ignore[misc]
            else:
                fresh = [row for row in rows if row.attempts == 0]
                for row in fresh:
                    await store.run(lambda db, row=row: batch_rows.settle(db, row.number, b"{}", failed=False))  # type: ignore[misc]
                if fresh:
                    rows = await store.run(lambda db: batch_rows.begin(db, WIDTH, True))
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
            await come(lambda: len(asked) == WIDTH)
        found = await store.read(lambda db: db.execute("SELECT state, attempts, count(*) FROM rows GROUP BY 1, 2").fetchall())
        assert found == [("pending", 0, 40)]
        async with working(answering(), store):
            assert (await ended(store, name))["request_counts"]["completed"] == 40
        store.close()

    run(test())


@pytest.mark.parametrize("kind", ["says nothing", "answers too much", "is no JSON"])
def test_a_line_that_can_never_be_kept_is_an_error_line(kind: str) -> None:
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


def test_a_busy_server_is_asked_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.batch_worker.PAUSES", (0.25, 8.0))
    paused: list[float] = []

    async def pause(self: BatchWorker, seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr(BatchWorker, "_pause", pause)

    async def test() -> None:
        store, asked = Store(), []  # type: ignore[var-annotated]
        await make(store, of(1))
        async with working(answering(0, 429, "queue_full", asked), store):
            await come(lambda: len(asked) > 8)
        assert paused[:8] == [0.25, 0.5, 1, 2, 4, 8, 8, 8]
        store.close()

    run(test())


def test_a_server_that_ends_does_not_wait_for_what_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.batch_worker.PAUSES", (3600.0, 3600.0))

    async def test() -> None:
        store, asked = Store(), []  # type: ignore[var-annotated]
        await make(store, of(1))
        async with working(answering(0, 429, "queue_full", asked), store) as worker:
            await come(lambda: asked)
            await worker.stop()
            await worker.settle()
        store.close()

    run(test())


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_line_that_finds_the_server_busy_is_not_asked_after_the_end_of_its_batch(how: str) -> None:
    """It waits as long as its batch is open, and no attempt is counted."""

    async def test() -> None:
        store, asked = Store(), []  # type: ignore[var-annotated]
        name = await make(store, of(700))  # more than are dropped at once
        async with working(answering(0, 503, "no_room", asked), store) as worker:
            await come(lambda: len(asked) >= 3 * WIDTH)
            if how == "cancelled":
                assert (await batches.cancel(store, name))["status"] == "cancelling"
            else:
                await store.run(lambda db: db.execute("UPDATE batches SET expires_at = 1 WHERE id = ?", (name,)))
            worker.poke()
            batch = await ended(store, name)
        good, bad = await written(store, batch)
        assert (batch["status"], good, len(bad)) == (how, [], 700)
        assert {row["error"]["code"] for row in bad} == {f"batch_{how}"}
        store.close()

    run(test())


def test_a_batch_expires_by_itself() -> None:
    """Nothing happens but that time goes by: what has not begun is dropped, what is under way is waited for."""

    async def test() -> None:
        store, go_on = Store(), asyncio.Event()
        name = await make(store, of(3))
        await store.run(lambda db: db.execute("UPDATE batches SET expires_at = created_at + 2 WHERE id = ?", (name,)))

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await go_on.wait()
            await answering()(scope, receive, send)

        worker = BatchWorker(slow, store, 1 << 30, width=1)
        worker.begin()
        while (found := await batches.find(store, name))["request_counts"]["failed"] < 2:
            await asyncio.sleep(0.01)
        assert found["status"] == "finalizing"
        go_on.set()
        found = await ended(store, name)
        assert (found["status"], found["request_counts"]["completed"]) == ("expired", 1)
        await worker.close()
        store.close()

    run(test())


def test_a_batch_waits_for_room_and_goes_on() -> None:
    """What batches hold counts: requests, and then answers. Where there is no room for an answer it is not lost, and nothing is
    computed twice; a batch that is new is refused meanwhile."""

    async def test() -> None:
        store, asked = Store(), []  # type: ignore[var-annotated]
        first, _ = await through(answering(10_000), store, ["a"] * 10, Limits())
        limits = Limits(batch_bytes=110_000 + 40 * 600)
        name = await make(store, of(40), limits)
        async with working(answering(1_000, asked=asked), store, limits.batch_bytes) as worker:
            await come(lambda: worker.trouble)
            assert "is full; delete" in worker.trouble
            await asyncio.sleep(0.3)
            before = (await batches.find(store, name))["request_counts"]["completed"]
            assert 0 < before < 40
            with pytest.raises(ApiError, match="is full; delete the files") as refused:
                await make(store, of(400), limits)
            assert refused.value.code == "storage_full"
            await files.delete(store, first["output_file_id"])
            batch = await ended(store, name)
            assert worker.trouble == ""
        assert (batch["status"], batch["request_counts"]["completed"], len(asked)) == ("completed", 40, 40)
        for file in [one["id"] for one in (await files.listed(store, None, None, 100, "asc"))["data"]]:
            await files.delete(store, file)
        left = "SELECT (SELECT count(*) FROM rows), (SELECT sum(bytes) FROM batches), (SELECT count(*) FROM chunks)"
        assert await store.read(lambda db: db.execute(left).fetchone()) == (0, 0, 0)
        store.close()

    run(test())


def test_a_full_disk_stops_a_batch_for_as_long_as_it_is_full() -> None:
    """Every line is asked once; what is answered when the disk is full is kept when it is not; clients hear a 507."""

    async def test() -> None:
        store, asked = Store(), []  # type: ignore[var-annotated]
        name = await make(store, of(100))
        (pages,) = store.writer.execute("PRAGMA page_count").fetchone()
        store.writer.execute(f"PRAGMA max_page_count = {pages + 20}")
        async with working(answering(10_000, asked=asked), store) as worker:
            await come(lambda: worker.trouble)
            assert "disk" in worker.trouble
            await asyncio.sleep(0.3)
            assert len(asked) <= WIDTH + 20
            with pytest.raises(ApiError, match="make room there") as full:
                await store.run(lambda db: keep(db, "a", b"x" * 100_000))
            assert (full.value.status, full.value.code) == (507, "disk_full")
            assert full.value.headers()["x-should-retry"] == "false"
            assert (await batches.find(store, name))["status"] == "in_progress"  # who reads is served
            store.writer.execute(f"PRAGMA max_page_count = {pages + 10_000}")
            batch = await ended(store, name)
            assert worker.trouble == ""
        assert (batch["status"], batch["request_counts"]["completed"], len(asked)) == ("completed", 100, 100)
        store.close()

    run(test())


def test_a_database_that_others_hold_stops_a_batch_for_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who writes hears a 503, all of them within the patience of one; who reads is served."""
    monkeypatch.setattr("headrace.server.store.PATIENCE", 0.2)

    async def test() -> None:
        store, asked = Store(tmp_path), []  # type: ignore[var-annotated]
        store.writer.execute("PRAGMA busy_timeout = 300")
        name = await make(store, of(20))
        other = sqlite3.connect(tmp_path / "server.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        async with working(answering(asked=asked), store) as worker:
            await come(lambda: worker.trouble)
            tried: list[int] = []
            work = [store.run(lambda db: tried.append(1)) for _ in range(50)]
            found = await asyncio.gather(*work, return_exceptions=True)
            assert {(one.status, one.code) for one in found if isinstance(one, ApiError)} == {(503, "storage_busy")}
            assert (len(found), tried) == (50, [])
            assert (await batches.find(store, name))["status"] == "in_progress"
            other.execute("ROLLBACK")
            other.close()
            batch = await ended(store, name)
            await come(lambda: worker.trouble == "")
        assert (batch["status"], len(asked)) == ("completed", 20)
        store.close()

    run(test())


def test_readers_do_not_wait_for_who_writes() -> None:
    async def test() -> None:
        store = Store()
        begun, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(db: sqlite3.Connection) -> None:
            keep(db, "a", b"x")
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()

        writing = asyncio.create_task(store.run(slow))
        await begun.wait()
        assert (await files.listed(store, None, None, 10, "asc"))["data"] == []
        assert not writing.done()
        go_on.set()
        await writing
        assert len((await files.listed(store, None, None, 10, "asc"))["data"]) == 1
        with pytest.raises(ApiError):
            await store.read(lambda db: keep(db, "a", b"x"))  # nothing is written by who reads
        store.close()

    run(test())


def test_a_worker_that_fails_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        store, failing = Store(), True
        begin = batch_rows.begin

        def fails(*arguments: Any) -> Any:
            if failing:
                raise MemoryError
            return begin(*arguments)

        monkeypatch.setattr(batch_rows, "begin", fails)
        name = await make(store, of(3))
        async with working(answering(), store) as worker:
            await come(lambda: worker.trouble)
            assert "its log says how" in worker.trouble
            failing = False
            assert (await ended(store, name))["status"] == "completed"
            await come(lambda: worker.trouble == "")
            worker._task.cancel()  # type: ignore[union-attr]  # what ends it for good
            await come(lambda: worker.trouble)
            assert "their worker has ended" in worker.trouble
        assert worker.trouble == ""  # in an orderly end it has, and that is as it should be
        store.close()

    run(test())


def peak(work: Any) -> int:
    """Bytes of Python at most beside what there was."""
    tracemalloc.start()
    try:
        run(work)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_answers_are_never_joined_in_memory() -> None:
    """30 MB of answers, written and read; control: what joins them takes as much."""

    async def test(join: bool) -> None:
        store = Store()
        name = await make(store, of(300))
        async with working(answering(100_000), store):
            batch = await ended(store, name)
        size, pieces = await files.content(store, batch["output_file_id"])
        read = 0
        held = []
        async for piece in pieces:
            read += len(piece)
            if join:
                held.append(piece)
        assert read == size > 30_000_000
        store.close()

    assert peak(test(False)) < 15_000_000
    assert peak(test(True)) > 30_000_000


def work_of(store: Store) -> list[int]:
    """Counts, from now on, the statements and the steps of SQLite's machine, those that read and those that write."""
    counts = [0, 0]

    def statement(_: str) -> None:
        counts[0] += 1

    def steps() -> None:
        counts[1] += 10

    for db in (store.writer, store.reader):
        db.set_trace_callback(statement)
        db.set_progress_handler(steps, 10)
    return counts


async def work_per_line(count: int) -> tuple[float, float]:
    store = Store()
    name = await make(store, of(count))
    counts = work_of(store)
    async with working(answering(10), store):
        with sqlite3.connect(store.folder / "server.sqlite") as uncounted:
            while uncounted.execute("SELECT status FROM batches").fetchone() == ("in_progress",):
                await asyncio.sleep(0.1)
        uncounted.close()
    assert (await batches.find(store, name))["request_counts"]["completed"] == count
    store.close()
    return counts[0] / count, counts[1] / count


def assert_constant(small: int, large: int) -> None:
    """Statements and steps a line, by work counted and not by the clock."""
    few, many = run(work_per_line(small)), run(work_per_line(large))
    assert many[0] < 1.1 * few[0] + 1
    assert many[1] < 1.1 * few[1]


def test_the_work_of_a_line_does_not_grow_with_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_constant(200, 1_000)
    settle = batch_rows.settle

    def counting(db: sqlite3.Connection, *arguments: Any, **more: Any) -> None:
        """The control: rows are counted when one is answered."""
        db.execute("SELECT count(*) FROM rows WHERE answer IS NULL").fetchone()
        settle(db, *arguments, **more)

    monkeypatch.setattr(batch_rows, "settle", counting)
    with pytest.raises(AssertionError):
        assert_constant(200, 1_000)


@pytest.mark.slow
def test_the_work_of_a_line_does_not_grow_with_a_large_batch() -> None:
    assert_constant(500, 5_000)


def test_lines_of_responses_do_not_push_out_what_people_said() -> None:
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
