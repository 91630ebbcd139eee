"""The database: one server at a time, private files, upgrades from every earlier version, and released disk space."""

import asyncio
import json
import sqlite3
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.server.access.principals import Principal
from headrace.server.http.api_error import ApiError
from headrace.server.settings import Limits
from headrace.server.storage import batches, files, store_schema
from headrace.server.storage.store import Store, StoreError
from tests.server.batching import ASK, answering, check_counters, ended, keep, lines, make, read_file, run, working, written
from tests.server.harness import PATIENCE

OLD = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, created INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
    expires INTEGER, content BLOB NOT NULL
);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, status TEXT NOT NULL, expires INTEGER NOT NULL,
    object TEXT NOT NULL, bytes INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, body TEXT, failed INTEGER, answer TEXT,
    attempts INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE INDEX unanswered ON lines (batch, number) WHERE answer IS NULL;
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, created INTEGER NOT NULL, bytes INTEGER NOT NULL,
    object TEXT NOT NULL, input TEXT NOT NULL
);
PRAGMA user_version = 2;
"""
TO_1 = "ALTER TABLE lines DROP COLUMN attempts; ALTER TABLE batches DROP COLUMN bytes; PRAGMA user_version = 1;"
STAMPS = "in_progress_at finalizing_at completed_at failed_at expired_at cancelling_at cancelled_at".split()


def old_batch(name: str, status: str, **more: Any) -> dict[str, Any]:
    """As versions 1 and 2 kept one."""
    counts = {"total": 0, "completed": 0, "failed": 0}
    return {
        "id": name, "object": "batch", "endpoint": "/v1/completions", "errors": None, "input_file_id": "file-in",
        "completion_window": "24h", "status": status, "output_file_id": None, "error_file_id": None,
        "created_at": 1_700_000_000, "expires_at": 4_000_000_000, **dict.fromkeys(STAMPS), "output_expires_after": None,
        "request_counts": counts, "metadata": {"a": "b"}, **more,
    }  # fmt: skip


ANSWERED = json.dumps({"id": "batch_req-1", "custom_id": "r1", "response": {"status_code": 200}, "error": None})
REFUSED = json.dumps({"id": "batch_req-2", "custom_id": "r2", "response": {"status_code": 400}, "error": None})
LARGE = b"line\n" * 200_000  # of several pieces
WRONG = {"code": "invalid_line", "message": "m", "line": 1, "param": None}
COUNTS = {"total": 9, "completed": 8, "failed": 1}
OLD_BATCHES = [
    old_batch("batch_done", "completed", output_file_id="file-out", completed_at=7, request_counts=COUNTS),
    old_batch("batch_bad", "failed", errors={"object": "list", "data": [WRONG]}),
    old_batch(
        "batch_open", "in_progress", in_progress_at=5, request_counts={"total": 40, "completed": 0, "failed": 0},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    ),
    old_batch("batch_through", "in_progress", request_counts={"total": 1, "completed": 0, "failed": 0}),
    old_batch("batch_stopped", "cancelling", cancelling_at=6, request_counts={"total": 2, "completed": 0, "failed": 0}),
]  # fmt: skip


def old_store(folder: Path, version: int) -> Path:
    """A database of an earlier version, with everything in it."""
    folder.mkdir()
    db = sqlite3.connect(folder / "server.sqlite", isolation_level=None)
    db.executescript(OLD)
    add = "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)"
    db.execute(add, ("file-in", 1_700_000_000, "in.jsonl", "batch", 1, None, b"x"))
    db.execute(add, ("file-out", 1_700_000_001, "out.jsonl", "batch_output", len(LARGE), 4_000_000_000, LARGE))
    for one in OLD_BATCHES:
        row = (one["id"], one["status"], one["expires_at"], json.dumps(one))
        db.execute("INSERT INTO batches (id, status, expires, object) VALUES (?, ?, ?, ?)", row)
    line = "INSERT INTO lines (batch, number, custom_id, body, failed, answer) VALUES (?, ?, ?, ?, ?, ?)"
    for at in range(40):
        answer = {1: (None, 0, ANSWERED), 2: (None, 1, REFUSED)}.get(at, (json.dumps({**ASK, "prompt": f"é{at}"}), None, None))
        db.execute(line, ("batch_open", at, f"r{at}", *answer))
    db.execute(line, ("batch_through", 0, "r0", None, 0, ANSWERED))
    for at in range(2):
        db.execute(line, ("batch_stopped", at, f"r{at}", json.dumps(ASK), None, None))
    db.execute("INSERT INTO responses (id, created, bytes, object, input) VALUES ('resp_1', 1, 2, '{}', '[]')")
    if version == 1:
        db.executescript(TO_1)
    else:
        db.execute("UPDATE lines SET attempts = 2 WHERE custom_id = 'r3'")
    db.close()
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_a_database_of_an_earlier_version_is_migrated(tmp_path: Path, version: int) -> None:
    async def test() -> None:
        store = Store(old_store(tmp_path / "state", version))
        assert await read_file(store, "file-in") == b"x"
        assert await read_file(store, "file-out") == LARGE
        listed = (await files.list_files(store, None, None, 10, "asc"))["data"]
        assert [(one["id"], one["bytes"], one["expires_at"], one["filename"]) for one in listed] == [
            ("file-in", 1, None, "in.jsonl"),
            ("file-out", len(LARGE), 4_000_000_000, "out.jsonl"),
        ]
        for old in OLD_BATCHES[:2]:  # what has ended is as it was
            assert await batches.find(store, old["id"]) == old
        open_now = await batches.find(store, "batch_open")
        assert open_now == {**OLD_BATCHES[2], "request_counts": {"total": 40, "completed": 1, "failed": 1}}
        tried = "SELECT attempts FROM rows WHERE custom_id = 'r3' AND attempts > 0"
        assert await store.read(lambda db: db.execute(tried).fetchall()) == ([(2,)] if version == 2 else [])
        assert await store.read(lambda db: db.execute("SELECT id FROM responses").fetchall()) == [("resp_1",)]
        asked: list[Any] = []
        async with working(answering(asked=asked), store):
            done = [await ended(store, old["id"]) for old in OLD_BATCHES[2:]]
        assert [one["status"] for one in done] == ["completed", "completed", "cancelled"]
        assert len(asked) == 38
        assert sorted(one["prompt"] for one in asked) == sorted(f"é{at}" for at in range(40) if at not in (1, 2))
        good, bad = await written(store, done[0])
        assert [row["custom_id"] for row in good] == [f"r{at}" for at in range(40) if at != 2]
        assert (good[1], bad) == (json.loads(ANSWERED), [json.loads(REFUSED)])
        check_counters(store.writer)
        store.close()
        Store(tmp_path / "state").close()

    run(test())


def test_an_upgrade_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says why, and the next server finds what was there."""
    folder = old_store(tmp_path / "state", 1)
    monkeypatch.setattr(store_schema, "OLD_GONE", "DROP TABLE not_there")
    with pytest.raises(StoreError, match="cannot be used") as error:
        Store(folder)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    store = Store(folder)
    assert run(batches.find(store, "batch_done")) == OLD_BATCHES[0]
    store.close()


def test_a_database_of_a_later_version_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "server.sqlite") as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(StoreError, match=r"has version 9 and this Headrace writes 4.*another --state"):
        Store(tmp_path)


def test_readable_files_become_private(tmp_path: Path) -> None:
    """The folder and the files in it are their owner's, whoever made them; a folder of everybody's is left alone."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    sqlite3.connect(folder / "server.sqlite").close()
    (folder / "server.sqlite").chmod(0o644)
    store = Store(folder)
    run(store.run(lambda db: keep(db, "a", b"x")))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir() if path.name != "server.lock"}
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}
    store.close()
    everybodys = tmp_path / "tmp"
    everybodys.mkdir()
    everybodys.chmod(0o1777)
    with pytest.raises(StoreError, match="shared by all users"):
        Store(everybodys)
    assert stat.S_IMODE(everybodys.stat().st_mode) == 0o1777


def test_a_temporary_store_leaves_no_files() -> None:
    store = Store()
    folder = store.folder
    assert folder.exists()
    store.close()
    assert not folder.exists()


def test_deleted_files_free_disk_space() -> None:
    async def test() -> None:
        store = Store()
        path = store.folder / "server.sqlite"
        made = [await store.run(lambda db: keep(db, "a", b"x" * 1_000_000)) for _ in range(20)]
        store.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert path.stat().st_size > 20_000_000
        for one in made:
            await files.delete(store, one["id"])
        async with working(None, store):
            while await store.read(lambda db: db.execute("PRAGMA freelist_count").fetchone()[0]):
                await asyncio.sleep(0.01)
        store.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        assert path.stat().st_size < 1_000_000
        store.close()

    run(test())


def test_files_and_batches_are_bounded_in_number() -> None:
    """Files are refused; of batches the oldest that have ended and hold nothing make room."""

    async def test() -> None:
        store, limits = Store(), Limits(files=2, batches=3)
        for _ in range(2):
            await store.run(lambda db: files.complete(db, files.create(db, limits, Principal()), "a", "batch", None))
        with pytest.raises(ApiError, match="keeps 2 files") as full:
            await store.run(lambda db: files.create(db, limits, Principal()))
        assert full.value.code == "storage_full"
        broken = [await make(store, b"{", limits) for _ in range(2)]
        first = await make(store, lines([ASK]), limits)
        second = await make(store, lines([ASK]), limits)
        third = await make(store, lines([ASK]), limits)
        names = [one["id"] for one in (await batches.list_batches(store, None, 10))["data"]]
        assert names == [third, second, first]
        for name in broken:
            with pytest.raises(ApiError, match="there is no batch"):
                await batches.find(store, name)
        with pytest.raises(ApiError, match="keeps 3 batches"):
            await make(store, lines([ASK]), limits)
        async with working(answering(), store):
            done = await ended(store, first)
            with pytest.raises(ApiError, match="keeps 3 batches"):  # what it wrote is still there
                await make(store, lines([ASK]), limits)
            await files.delete(store, done["output_file_id"])
            await make(store, lines([ASK]), limits)
        store.close()

    run(test())


def test_pages_of_lists() -> None:
    async def test() -> None:
        store = Store()
        made = [await make(store, lines([ASK])) for _ in range(5)]
        for limit, after, expected, more in (
            (2, None, made[:2:-1], True), (2, made[3], made[2:0:-1], True), (2, made[2], made[1::-1], False),
            (10, made[0], [], False), (10, "batch_none", [], False),
        ):  # fmt: skip
            found = await batches.list_batches(store, after, limit)
            assert ([one["id"] for one in found["data"]], found["has_more"]) == (expected, more)
        ids = [one["id"] for one in (await files.list_files(store, None, None, 10, "asc"))["data"]]
        for order, after, expected in (("asc", ids[1], ids[2:4]), ("desc", ids[3], ids[2:0:-1])):
            found = await files.list_files(store, "batch", after, 2, order)
            assert [one["id"] for one in found["data"]] == expected
        assert (await files.list_files(store, "evals", None, 2, "asc"))["data"] == []
        store.close()

    run(test())


def test_a_folder_is_locked_by_one_server(tmp_path: Path) -> None:
    first = Store(tmp_path / "state")
    with pytest.raises(StoreError, match="in use by another server"):
        Store(tmp_path / "state")
    first.close()
    Store(tmp_path / "state").close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "server.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        Store(tmp_path / "file")


def test_a_cancelled_task_leaves_no_open_transaction(tmp_path: Path) -> None:
    """One is under way when its task is cancelled, twice; the next begins after it, and it is kept."""
    began, go_on = threading.Event(), threading.Event()

    def slow(db: sqlite3.Connection) -> None:
        began.set()
        assert go_on.wait(PATIENCE)
        keep(db, "a", b"x")

    async def main() -> list[str]:
        store = Store(tmp_path / "state")
        first = asyncio.create_task(store.run(slow))
        assert await asyncio.to_thread(began.wait, PATIENCE)
        second = asyncio.create_task(store.run(lambda db: db.execute("SELECT filename FROM files").fetchall()))
        for _ in range(2):
            first.cancel()
            await asyncio.sleep(0)
        left = first.done()
        go_on.set()
        assert not left
        with pytest.raises(asyncio.CancelledError):
            await first
        found = [name for (name,) in await second]
        store.close()
        return found

    assert asyncio.run(main()) == ["a"]
