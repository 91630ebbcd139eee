"""A client without a valid key cannot keep out, or slow down, a client that has one; neither can pages of other sites."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from headrace.server.access.keys import KeyRing
from headrace.server.http.guard import PROBES, Guard
from headrace.server.settings import Limits, ServerSettings
from tests.server.harness import PATIENCE, Running

KEY = "a-long-enough-key"
RIGHT = f"Authorization: Bearer {KEY}\r\n".encode()
WRONG_KEY = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong-wrong\r\n\r\n"
WEBSOCKET = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
ROUNDS = 600  # refused requests one after the other
BURST = 400  # connections at the same time
AT_ONCE = 64  # and refused requests whose answers nobody reads


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with Running("no-model", begin=False, key=KEY, limits=Limits()) as running:
        yield running


@pytest.fixture(scope="module")
def local() -> Iterator[Running]:
    """A server without a key."""
    with Running("no-model", begin=False, limits=Limits()) as running:
        yield running


def connect(server: Running, sent: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    made.sendall(sent)
    return made


def exchange(server: Running, sent: bytes) -> bytes:
    """Everything the server sends back until it closes the connection."""
    with connect(server, sent) as client:
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize(
    ("kind", "sent", "status"), [("locked", WRONG_KEY, b"401"), ("local", WEBSOCKET, b"403")], ids=["wrong key", "websocket"]
)
def test_refused_requests_do_not_block_valid_requests(
    request: pytest.FixtureRequest, kind: str, sent: bytes, status: bytes
) -> None:
    """Each is answered at once, its connection is closed, and a right request from the same address is answered too."""
    server: Running = request.getfixturevalue(kind)
    with contextlib.ExitStack() as stack:
        for _ in range(ROUNDS):
            assert exchange(server, sent).startswith(b"HTTP/1.1 " + status)
        for _ in range(AT_ONCE):
            stack.enter_context(connect(server, sent))
        for _ in range(20):
            headers = {"Authorization": f"Bearer {KEY}"}
            assert httpx.get(f"{server.base}/v1/models", headers=headers, trust_env=False).status_code == 200


def test_a_refusal_closes_the_connection_and_a_client_error_with_a_key_does_not(locked: Running) -> None:
    refused = exchange(locked, WRONG_KEY * 3)
    assert refused.count(b"HTTP/1.1 401") == refused.lower().count(b"connection: close") == 1
    mistakes = (
        b"GET /no/such/path HTTP/1.1\r\nHost: x\r\n" + RIGHT + b"\r\n"
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1\r\n" + RIGHT + b"\r\n{"
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: 0\r\n" + RIGHT + b"\r\n"
        b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    answers = exchange(locked, mistakes)
    assert [answers.count(b"HTTP/1.1 " + status) for status in (b"404", b"400", b"200")] == [1, 2, 1]


def test_connections_of_an_address_without_a_key_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its oldest is closed, and a client with a key at the same address keeps its connection, and gets new ones."""
    monkeypatch.setattr("headrace.server.http.connection.GRACE", 0.0)
    limits = Limits(anonymous=4, header_seconds=PATIENCE)
    ask = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + RIGHT + b"\r\n"
    with Running("no-model", begin=False, key=KEY, limits=limits) as server, contextlib.ExitStack() as stack:
        kept = stack.enter_context(connect(server, ask))
        assert kept.recv(12) == b"HTTP/1.1 200"
        idle = [stack.enter_context(connect(server)) for _ in range(40)]
        assert idle[0].recv(1) == b""
        assert exchange(server, ask.replace(b"Host: x", b"Host: x\r\nConnection: close")).startswith(b"HTTP/1.1 200")
        kept.sendall(ask)
        while b"HTTP/1.1 200" not in (part := kept.recv(65536)):
            assert part
        assert server.on_loop(lambda: len(server.server.server_state.connections)) <= 1 + 4


def test_a_burst_of_connections_is_accepted(locked: Running) -> None:
    """While the server is busy the system takes them, so that no client has to connect again."""
    limit = Path("/proc/sys/net/core/somaxconn")
    if not limit.exists() or int(limit.read_text()) < BURST:
        pytest.skip(f"this system holds fewer than {BURST} new connections (net.core.somaxconn)")
    with contextlib.ExitStack() as stack, locked.held():
        for _ in range(BURST):
            stack.enter_context(socket.create_connection(("127.0.0.1", locked.port), timeout=10))


PUBLIC = frozenset({"/"})  # paths without a key


class Door:
    """A guard whose application answers when it is told to."""

    def __init__(self, **limits: Any) -> None:
        settings = ServerSettings("tiny", key=KEY, limits=Limits(**limits))
        self.go_on = asyncio.Event()
        self.guard = Guard(self._app, settings, KeyRing(settings), lambda status, principal: None, PUBLIC)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] not in PROBES | PUBLIC:
            await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def get_status(self, path: str, key: str = "") -> int:
        """The status of a GET."""
        statuses: list[int] = []

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))
            await asyncio.sleep(0)

        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "client": ("127.0.0.1", 1)}
        await self.guard(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
        return statuses[0]


def test_only_requests_with_a_key_count_and_probes_are_always_answered() -> None:
    async def main() -> None:
        door = Door(connections=2)
        refused = [asyncio.create_task(door.get_status("/v1/models")) for _ in range(50)]
        await asyncio.sleep(0)  # they have begun, and none has ended
        honest = [asyncio.create_task(door.get_status("/v1/models", KEY)) for _ in range(2)]
        await asyncio.sleep(0)
        assert await door.get_status("/v1/models", KEY) == 503
        assert {await door.get_status(path) for path in (*PROBES, "/")} == {200}
        door.go_on.set()
        assert await asyncio.gather(*refused, *honest) == [401] * 50 + [200] * 2
        assert await door.get_status("/v1/models", KEY) == 200
        assert not door.guard._open

    asyncio.run(main())


@pytest.mark.parametrize("count", [100, 102, 15_000])
def test_headers_are_counted(locked: Running, count: int) -> None:
    """Before they are read; so are the trailers of a body in chunks."""
    head = b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * (count - 2) + b"Connection: close\r\n\r\n"
    chunked = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n" + RIGHT
    body = b"Connection: close\r\n\r\n2\r\n{}\r\n0\r\n" + b"a:\r\n" * count + b"\r\n"
    answers = exchange(locked, head), exchange(locked, chunked + body)
    assert [answer[9:12] for answer in answers] == ([b"200", b"400"] if count == 100 else [b"431", b"431"])
    assert (b"100 headers" in answers[0]) == (count > 100)


def test_a_complete_head_is_bounded(locked: Running) -> None:
    head = b"GET /live HTTP/1.1\r\nHost: x\r\na: " + b"a" * (64 << 10) + b"\r\nConnection: close\r\n\r\n"
    assert exchange(locked, head).startswith(b"HTTP/1.1 431")
