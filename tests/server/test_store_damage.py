"""Damaged databases and files deleted during a download: a clear error or the complete data, never a part."""

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx
import pytest

from headrace.server.settings import Limits
from headrace.server.storage import files
from headrace.server.storage.store import StorageError, Store, StoreError
from tests.server.batching import answering, come, make, of, read_file, run, through, working
from tests.server.harness import Running

PAGE = 4096  # bytes, of SQLite
LINES = 40


@pytest.fixture(scope="module")
def stored_batch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, bytes]:
    """A server's folder, the id of what a batch has written in it, and that."""
    folder = tmp_path_factory.mktemp("state")

    async def fill() -> tuple[Path, str, bytes]:
        store = Store(folder)
        batch, _ = await through(answering(3_000), store, ["a"] * LINES, Limits())
        content = await read_file(store, batch["output_file_id"])
        await make(store, of(3))
        store.close()
        return folder, batch["output_file_id"], content

    return run(fill())


def cut(data: bytes, page: int) -> bytes:
    return data[: page * PAGE]


def blank(data: bytes, page: int) -> bytes:
    return data[: page * PAGE] + bytes(PAGE) + data[(page + 1) * PAGE :]


def other(data: bytes, page: int) -> bytes:
    return b"not a database " * page


@pytest.mark.parametrize("harm", [cut, blank, other])
def test_a_damaged_database_is_refused_or_whole(
    stored_batch: tuple[Path, str, bytes], tmp_path: Path, harm: Callable[[bytes, int], bytes]
) -> None:
    folder, name, content = stored_batch
    whole = (folder / "server.sqlite").read_bytes()

    async def look(state: Path) -> str:
        try:
            store = Store(state)
        except StoreError as error:
            return str(error).partition(": ")[2][:36]
        try:
            assert await read_file(store, name) == content
        except StorageError as error:
            return f"{error.status} {error.code}, again: {error.headers()['x-should-retry']}"
        finally:
            store.close()
        return "whole"

    found = []
    for page in range(1, len(whole) // PAGE, 3):
        shutil.rmtree(tmp_path / "state", ignore_errors=True)
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "server.sqlite").write_bytes(harm(whole, page))
        found.append(run(look(tmp_path / "state")))
    refused, damaged = "the server's database cannot be used", "500 storage_damaged, again: false"
    assert set(found) == ({damaged, "whole"} if harm is blank else {refused})


def test_a_damaged_database_stops_batches_with_a_message(stored_batch: tuple[Path, str, bytes], tmp_path: Path) -> None:
    shutil.copytree(stored_batch[0], tmp_path / "state")
    path = tmp_path / "state" / "server.sqlite"
    whole = path.read_bytes()
    path.write_bytes(whole[:PAGE] + b"x" * (len(whole) - PAGE))  # all but the page that says what it is

    async def test() -> None:
        store = Store(tmp_path / "state")
        async with working(answering(), store) as worker:
            await come(lambda: worker.trouble)
            assert worker.trouble.startswith("the server's database is damaged")
        store.close()

    run(test())


def test_a_file_that_is_deleted_under_a_download_is_cut_not_shorter(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been announced does not come, so the client knows that it has not all of it."""
    read, asked = files.read_piece, []  # type: ignore[var-annotated]

    def first(db: sqlite3.Connection, file: files.StoredFile, after: int) -> tuple[int, bytes] | None:
        asked.append(after)
        if len(asked) == 2:
            assert server.openai.files.delete(made.id).deleted
        return read(db, file, after)

    with Running(tiny, begin=False) as server:
        made = server.openai.files.create(file=("a", b"x" * 1_000_000), purpose="batch")
        monkeypatch.setattr(files, "read_piece", first)
        with pytest.raises(httpx.RemoteProtocolError):
            server.http.get(f"/v1/files/{made.id}/content")
        assert len(asked) == 2
        assert server.http.get(f"/v1/files/{made.id}/content").status_code == 404
        assert server.http.get("/live").status_code == 200
