"""Uploads: streamed to disk, refused midway, abandoned by their clients."""

import contextlib
import socket
import sqlite3
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import httpx2 as httpx
import pytest

from tests.server.harness import PATIENCE, PATIENT, Running, in_thread, until


def upload(server: Running, size: int, parts: int = 1 << 16) -> httpx.Response:
    """A file of so many bytes, sent in parts that nobody holds together."""
    head = (
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n',
        b'\r\n--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xyz--\r\n',
    )

    def body() -> Iterator[bytes]:
        yield head[0]
        part = b"0123456789abcdef" * (parts // 16)
        for _ in range(size // parts):
            yield part
        yield head[1]

    headers = {"Content-Type": "multipart/form-data; boundary=xyz"}
    return server.http.post("/v1/files", content=body(), headers=headers)


def test_uploads_and_downloads_are_never_whole_in_memory() -> None:
    """Four at once, of 24 MB each; the control is the body of another request, which is."""
    with Running("no-model", begin=False, limits=replace(PATIENT, body=32 << 20)) as server:
        tracemalloc.start()
        try:
            sending = [in_thread(lambda: upload(server, 24 << 20)) for _ in range(4)]
            made = [one.result().json() for one in sending]
            size = 0
            with server.http.stream("GET", f"/v1/files/{made[0]['id']}/content") as answer:
                for part in answer.iter_bytes():
                    assert part == (b"0123456789abcdef" * (len(part) // 16 + 2))[size % 16 :][: len(part)]
                    size += len(part)
            assert size == made[0]["bytes"] == 24 << 20
            assert tracemalloc.get_traced_memory()[1] < 20_000_000
            server.http.post("/tokenize", content=b" " * (24 << 20), headers={"Content-Type": "application/json"})
            assert tracemalloc.get_traced_memory()[1] > 24_000_000
        finally:
            tracemalloc.stop()


def test_refused_and_abandoned_uploads_leave_no_rows() -> None:
    """Too much, too slow, left by its client, or no room: each is told so, and nothing of it is kept."""
    limits = replace(PATIENT, file=1 << 20, stored=1 << 19, body_seconds=PATIENCE)
    with Running("no-model", begin=False, limits=limits) as server:
        assert upload(server, 2 << 20).status_code == 413
        full = upload(server, (1 << 20) - (1 << 16))
        assert (full.status_code, full.json()["error"]["code"]) == (400, "storage_full")
        with socket.create_connection(("127.0.0.1", server.port)) as left:
            left.sendall(
                b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=xyz\r\n"
                b'Content-Length: 400000\r\n\r\n--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
                + b"x"
                * 300_000
            )
            until(lambda: stored_counts(server)[1] > 0)
        until(lambda: stored_counts(server) == (0, 0))
        assert server.openai.files.list().data == []
        assert upload(server, 1 << 18).status_code == 200
    with Running("no-model", begin=False, limits=replace(PATIENT, body_seconds=0.2)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(
                b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=xyz\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            assert b" 408 " in slow.recv(1000)
        until(lambda: stored_counts(server) == (0, 0))


def stored_counts(server: Running) -> tuple[int, int]:
    """Rows of files and of their pieces, complete or not."""
    with sqlite3.connect(server.server.store.folder / "server.sqlite") as db:
        found = db.execute("SELECT (SELECT count(*) FROM files), (SELECT count(*) FROM chunks)").fetchone()
    db.close()
    return tuple(found)


@pytest.mark.parametrize(
    "body",
    [
        b"--xyz\r\nContent-Disposition: form-data\r\n\r\nx\r\n--xyz--\r\n",
        b"--xyz\r\nX-Y: " + b"x" * 9000 + b"\r\n\r\n",
        b"--xyz\r\n" + b"x" * 9000,
        b"--xyz\r\n" + b"X-Y: 1\r\n" * 5000 + b"\r\n--xyz--\r\n",
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nxxxxx',
        b"--abc\r\n\r\n",
        b"x",
    ],
)
def test_an_invalid_form_is_refused(server: Running, body: bytes) -> None:
    before = stored_counts(server)
    answer = server.http.post("/v1/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=xyz"})
    assert (answer.status_code, "multipart form with one file" in answer.text) == (400, True)
    assert stored_counts(server) == before


def test_a_field_that_is_too_long_is_named(server: Running) -> None:
    body = b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 2000 + b"\r\n--xyz--\r\n"
    answer = server.http.post("/v1/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=xyz"})
    assert (answer.status_code, "purpose has more than 1,000 bytes" in answer.text) == (400, True)


def test_invalid_forms_are_not_logged(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """The parser would log each of them, without a client and without a bound; the line of the request is enough."""
    for body in (b"junk", b"--a\r\nX" + b"x" * 2_000, b"--a\r\n\x00: 1\r\n"):
        headers = {"Content-Type": "multipart/form-data; boundary=a"}
        assert server.http.post("/v1/files", content=body, headers=headers).status_code == 400
    assert [record for record in caplog.records if record.name.startswith("python_multipart")] == []


def test_a_refused_body_is_not_held_in_memory() -> None:
    """Without the key a body is read for a while, so that its client hears the refusal, and forgotten as it comes."""
    with Running("no-model", begin=False, key="a-long-key", limits=replace(PATIENT, body=32 << 20)) as server:
        part = b" " * (1 << 16)
        tracemalloc.start()
        try:
            with contextlib.suppress(httpx.TransportError):  # a slow machine did not send it all within that while
                headers = {"Authorization": "Bearer wrong", "Content-Type": "application/json"}
                answer = server.http.post("/tokenize", content=(part for _ in range(200)), headers=headers)
                assert answer.status_code == 401
            assert tracemalloc.get_traced_memory()[1] < 6_000_000
        finally:
            tracemalloc.stop()
