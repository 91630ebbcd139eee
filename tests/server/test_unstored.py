"""A computed response reaches the client, whether it can be stored or not."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Running

ASK: dict[str, Any] = {"model": "tiny", "input": "Name a river.", "temperature": 0, "max_output_tokens": 8}
ASK["metadata"] = {f"key{number}": "x" * 512 for number in range(16)}  # which no page has room for beside others


@pytest.fixture
def stored_server(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A server whose database is in `tmp_path`, and which waits for it for a fraction of a second."""
    monkeypatch.setattr("headrace.server.storage.store.TIMEOUT_SECONDS", 0.2)
    with Running(tiny, state=tmp_path / "state") as server:
        yield server


def delivered(server: Running, code: str) -> None:
    """An answer that is not stored, whole and streamed."""
    whole = server.post("/v1/responses", ASK)
    assert whole.status_code == 200
    assert "x-should-retry" not in whole.headers
    *_, last = server.openai.responses.create(**ASK, stream=True)
    for made in (whole.json(), last.response.to_dict()):
        assert made["output"][0]["content"][0]["text"]
        assert made["store"] is False
        (warning,) = made["warnings"]
        assert warning["code"] == code
        assert "was not stored" in warning["message"]
        assert server.http.get(f"/v1/responses/{made['id']}").status_code == 404
    health = server.health()
    assert health["status"] == "ready"
    assert "the last write failed" in health["storage"]


def test_a_full_disk(stored_server: Running) -> None:
    writer = stored_server.server.store.writer
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count = {pages}")
    while stored_server.post("/v1/responses", ASK).json()["store"]:
        pass  # the pages that are there fill up
    delivered(stored_server, "disk_full")
    writer.execute(f"PRAGMA max_page_count = {pages + 1000}")
    made = stored_server.openai.responses.create(**ASK)
    assert "warnings" not in made.to_dict()
    assert "storage" not in stored_server.health()
    assert stored_server.openai.responses.retrieve(made.id).output_text == made.output_text


def test_a_locked_database(stored_server: Running, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "state" / "server.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        delivered(stored_server, "storage_busy")
    finally:
        other.execute("ROLLBACK")
        other.close()
    assert stored_server.openai.responses.create(**ASK).to_dict()["store"] is True
    assert "storage" not in stored_server.health()
