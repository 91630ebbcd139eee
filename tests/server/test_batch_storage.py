"""Cost of batches in disk, memory and work per line; full disks and locked databases pause a batch and lose nothing."""

import asyncio
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from headrace.server.http.api_error import ApiError
from headrace.server.protocols.fields import BatchRequest
from headrace.server.settings import Limits
from headrace.server.storage import batch_input, batch_rows, batches, files
from headrace.server.storage.batch_worker import MAX_RUNNING
from headrace.server.storage.store import Store
from tests.server.batching import answering, come, ended, keep, make, of, run, through, working

pytestmark = pytest.mark.usefixtures("quick")


def test_a_batch_waits_for_storage_and_resumes() -> None:
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
        for file in [one["id"] for one in (await files.list_files(store, None, None, 100, "asc"))["data"]]:
            await files.delete(store, file)
        left = "SELECT (SELECT count(*) FROM rows), (SELECT sum(bytes) FROM batches), (SELECT count(*) FROM chunks)"
        assert await store.read(lambda db: db.execute(left).fetchone()) == (0, 0, 0)
        store.close()

    run(test())


def test_a_full_disk_pauses_a_batch() -> None:
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
            assert len(asked) <= MAX_RUNNING + 20
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


def test_a_locked_database_pauses_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who writes hears a 503, all of them within the patience of one; who reads is served."""
    monkeypatch.setattr("headrace.server.storage.store.TIMEOUT_SECONDS", 2.0)

    async def test() -> None:
        store, asked = Store(tmp_path), []  # type: ignore[var-annotated]
        store.writer.execute("PRAGMA busy_timeout = 500")
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


def test_a_bad_file_inserts_one_row() -> None:
    """The last of many lines is bad: no row is inserted."""

    async def test() -> None:
        store = Store()
        file = await store.run(lambda db: keep(db, "a", of(2000) + b"\n{"))
        statements: list[str] = []
        store.writer.set_trace_callback(statements.append)
        asked = BatchRequest(input_file_id=file["id"], endpoint="/v1/completions", completion_window="24h")
        batch = await batches.create(store, asked, Limits())
        assert (batch["status"], batch["errors"]["data"][0]["line"]) == ("failed", 2001)
        assert [one for one in statements if one.startswith("INSERT")] == [one for one in statements if "INTO batches" in one]
        store.close()

    run(test())


def test_a_file_is_checked_while_another_writes() -> None:
    async def test() -> None:
        store = Store()
        file = await store.run(lambda db: files.find(db, keep(db, "a", of(10) + b"\n{")["id"], "anonymous"))
        begun, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(db: sqlite3.Connection) -> None:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()

        writing = asyncio.create_task(store.run(slow))
        await begun.wait()
        check = batch_input.InputCheck(file, "/v1/completions", Limits())
        await check.run(store)
        assert [one["line"] for one in check.errors] == [11]
        assert not writing.done()
        go_on.set()
        await writing
        store.close()

    run(test())


def test_readers_do_not_wait_for_the_writer() -> None:
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
        assert (await files.list_files(store, None, None, 10, "asc"))["data"] == []
        assert not writing.done()
        go_on.set()
        await writing
        assert len((await files.list_files(store, None, None, 10, "asc"))["data"]) == 1
        with pytest.raises(ApiError):
            await store.read(lambda db: keep(db, "a", b"x"))  # nothing is written by who reads
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
    settle = batch_rows.finish_row

    def counting(db: sqlite3.Connection, *arguments: Any, **more: Any) -> None:
        """The control: rows are counted when one is answered."""
        db.execute("SELECT count(*) FROM rows WHERE answer IS NULL").fetchone()
        settle(db, *arguments, **more)

    monkeypatch.setattr(batch_rows, "finish_row", counting)
    with pytest.raises(AssertionError):
        assert_constant(200, 1_000)


@pytest.mark.slow
def test_the_work_of_a_line_does_not_grow_with_a_large_batch() -> None:
    assert_constant(500, 5_000)
