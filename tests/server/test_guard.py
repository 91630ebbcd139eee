"""The guard in front of the server: keys, hosts, content types, sizes, slow clients. Refusals need no engine."""

import ast
import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from headrace import __version__
from headrace.server.access.keys import KeyRing
from headrace.server.http.connection import CHUNK, BatchedTransport, WriteBatch, make_protocol
from headrace.server.http.guard import Guard
from headrace.server.serving import SPARE, allow_files
from headrace.server.settings import Limits, ServerSettings, SettingsError, is_loopback
from tests.server.harness import PATIENCE, Running, until

KEY = "a-long-enough-key"
ROUTES = [
    ("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"), ("POST", "/v1/classify"), ("POST", "/v1/rerank"),
    ("POST", "/v1/audio/transcriptions"), ("POST", "/v1/audio/translations"),
    ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/tokenizer_info"),
    ("POST", "/v1/responses/input_tokens"), ("POST", "/v1/responses/tiny/cancel"),
    ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/no/such/path"),
    ("POST", "/page/render"),
    ("DELETE", "/v1/models/tiny"), ("OPTIONS", "/v1/completions"),
    ("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/files/tiny"), ("DELETE", "/v1/files/tiny"),
    ("GET", "/v1/files/tiny/content"), ("POST", "/v1/batches"), ("GET", "/v1/batches"), ("GET", "/v1/batches/tiny"),
    ("POST", "/v1/batches/tiny/cancel"), ("POST", "/v1/responses"), ("GET", "/v1/responses/tiny"), ("GET", "/version"),
    ("GET", "/models"), ("POST", "/models/load"), ("POST", "/models/unload"), ("POST", "/models/mode"),
    ("DELETE", "/v1/responses/tiny"), ("GET", "/v1/responses/tiny/input_items"),
]  # fmt: skip


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with Running("no-model", begin=False, key=KEY, limits=Limits(body=2000, header=4096)) as running:
        yield running


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    """Waits for nobody: only for what is there at once (`exchange`)."""
    with Running("no-model", begin=False, key=KEY, limits=Limits(body_seconds=0.2, header_seconds=0.2)) as running:
        yield running


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_the_key(locked: Running, method: str, path: str) -> None:
    for wrong in ("", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer é"):
        answer = locked.http.request(method, path, json={}, headers={"Authorization": wrong.encode()})  # type: ignore[dict-item]
        assert answer.status_code == 401, wrong
        assert answer.headers["www-authenticate"] == "Bearer"
    assert locked.http.request(method, path, json={}).status_code != 401


def test_health_needs_no_key_and_returns_the_state(locked: Running) -> None:
    answer = locked.http.get("/health", headers={"Authorization": ""})
    assert answer.status_code == 503
    assert answer.json()["status"] == "closed"


def test_live_and_ready_probes_differ_during_loading(locked: Running) -> None:
    """Without a key, and by HEAD too: a server that is loading lives, and is not ready."""
    for method in ("GET", "HEAD"):
        live, ready = (locked.http.request(method, path, headers={"Authorization": ""}) for path in ("/live", "/ready"))
        assert (live.status_code, ready.status_code) == (200, 503)
        assert ready.headers["retry-after"]
        assert (live.content == b"") is (method == "HEAD")
    assert locked.http.get("/version").json() == {"version": __version__}


def test_the_key_is_read_from_either_header(locked: Running) -> None:
    for given, status in ((KEY, 200), (KEY + "x", 401), ("", 401)):
        answer = httpx.get(f"{locked.base}/v1/models", headers={"X-Api-Key": given}, trust_env=False)
        assert answer.status_code == status


def test_an_answer_has_the_request_id_of_its_client_or_a_new_id(locked: Running) -> None:
    def name(given: str | None, path: str = "/live") -> str:
        return locked.http.get(path, headers={} if given is None else {"X-Request-Id": given}).headers["x-request-id"]

    assert name("my-own_1.2") == "my-own_1.2"
    assert name("my-own", "/no/such/path") == "my-own"
    made = {name(None), name(None), name("a b"), name("x" * 65), name("<script>")}
    assert len(made) == 5
    assert all(one.startswith("req_") for one in made)


def test_probes_are_answered_however_many_requests_are_open() -> None:
    settings = ServerSettings("tiny", limits=Limits(connections=0))
    for path, status in (("/health", 200), ("/live", 200), ("/ready", 200), ("/v1/models", 503)):
        assert asyncio.run(call(settings=settings, path=path))[0] == status


def test_every_route_of_the_document_is_tested(locked: Running) -> None:
    document = locked.http.get("/openapi.json").json()
    there = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    tested = {(method, path.replace("/tiny", "/{name}")) for method, path in ROUTES}
    assert there - tested == {("GET", "/health"), ("GET", "/live"), ("GET", "/ready")}


def test_keys_are_compared_in_constant_time() -> None:
    """All of them, hashed: what is known of a key is in no `==` and no look-up."""
    source = (Path(__file__).parents[2] / "src/headrace/server/access/keys.py").read_text("utf-8")
    (of,) = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == "of"]
    calls = [ast.unparse(node.func) for node in ast.walk(of) if isinstance(node, ast.Call)]
    assert calls == ["_hash", "hmac.compare_digest"]
    assert not [node for node in ast.walk(of) if isinstance(node, ast.Compare | ast.Subscript | ast.Break)]


def test_an_open_address_requires_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", ""):
        with pytest.raises(SettingsError, match="a key is needed"):
            ServerSettings("tiny", host=host)
        ServerSettings("tiny", host=host, key=KEY)
    for host in ("127.0.0.1", "::1", "localhost"):
        ServerSettings("tiny", host=host)
    for key in ("short", "with a space", "", "ключ-ключ-ключ"):
        with pytest.raises(SettingsError, match="make a longer one"):
            ServerSettings("tiny", key=key)
    assert not is_loopback("127.0.0.1.example.org")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[::2]:80", ""])
def test_without_a_key_other_names_are_refused(host: str) -> None:
    status, body = asyncio.run(call(headers={"host": host}))
    assert status == 403
    assert "localhost" in body


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]:8000", "127.1.2.3"])
def test_without_a_key_names_of_this_machine_are_served(host: str) -> None:
    assert asyncio.run(call(headers={"host": host}))[0] == 200


def test_a_request_without_a_body_needs_no_type() -> None:
    """As clients cancel a batch."""
    for headers in ({}, {"content-length": "0"}, {"content-type": "text/plain"}):
        assert asyncio.run(call("POST", headers=headers))[0] == 200


def test_a_body_is_bounded_with_and_without_a_content_length(locked: Running) -> None:
    assert locked.http.post("/tokenize", json={"prompt": "a" * 3000}).status_code == 413
    chunks = (b"a" * 100 for _ in range(1000))
    answer = locked.http.post("/tokenize", content=chunks, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert "2000 bytes" in answer.json()["error"]["message"]


def test_more_requests_than_connections_get_a_503() -> None:
    settings = ServerSettings("tiny", limits=Limits(connections=0))
    status, body = asyncio.run(call(settings=settings))
    assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")


def test_a_body_that_does_not_arrive_ends_the_request(hasty: Running) -> None:
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    assert exchange(hasty, f"{head}Content-Length: 100\r\n\r\n{{".encode()).startswith(b"HTTP/1.1 408")


def test_a_head_that_does_not_arrive_ends_the_connection(hasty: Running) -> None:
    assert exchange(hasty, b"") == b""
    assert exchange(hasty, b"GET /health HTTP/1.1\r\nHost: x\r\nA: ") == b""
    first = exchange(hasty, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHo")
    assert first.startswith(b"HTTP/1.1 503")
    assert first.count(b"HTTP/1.1") == 1


def test_a_head_that_is_too_large_is_refused(locked: Running) -> None:
    assert exchange(locked, b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 10_000).startswith(b"HTTP/1.1 4")


def test_no_other_site_is_allowed_in(locked: Running) -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for answer in (locked.http.options("/v1/completions", headers=headers), locked.http.get("/health", headers=headers)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_tls() -> None:
    here = Path(__file__).parent
    cert, key = str(here / "tls_cert.pem"), str(here / "tls_key.pem")
    with Running("no-model", begin=False, tls_cert=cert, tls_key=key) as running:
        context = ssl.create_default_context(cafile=cert)
        answer = httpx.get(f"https://localhost:{running.port}/v1/models", verify=context, trust_env=False)
        assert answer.json()["data"][0]["id"] == "tiny"
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"https://localhost:{running.port}/v1/models", trust_env=False)


def exchange(server: Running, data: bytes) -> bytes:
    """All the server sends after these bytes, which are there when it sees the connection, until it closes that."""
    with socket.socket() as sock:
        sock.settimeout(PATIENCE)
        with server.held():
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(data)
        parts = b""
        while part := sock.recv(65536):
            parts += part
        return parts


async def call(
    method: str = "GET",
    headers: dict[str, str] | None = None,
    settings: ServerSettings | None = None,
    path: str = "/v1/models",
) -> tuple[int, str]:
    """Status and body of one request through the guard alone; behind it everything is 200."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"host": "localhost", "content-type": "application/json", **(headers or {})}
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    chosen = settings or ServerSettings("tiny")
    guard = Guard(app, chosen, KeyRing(chosen), lambda status, principal: None)
    await guard({"type": "http", "method": method, "path": path, "headers": raw}, receive, send)
    return sent[0]["status"], sent[1]["body"].decode()


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"10")], [(b"content-length", b"10"), (b"connection", b"close")]])
def test_the_fast_writer_sends_the_bytes_of_h11(headers: list[tuple[bytes, bytes]]) -> None:
    """Streamed answers in chunks go past h11; counted ones cannot. Two answers on one connection, where it is kept."""
    long, short = (asyncio.run(written(headers, way)) for way in (False, True))
    assert short == long
    assert b"defghij" in long


async def written(headers: list[tuple[bytes, bytes]], short_way: bool) -> bytes:
    taken: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for data in (b"abc", b"defghij"):
            taken.append(short_way and scope["state"][CHUNK](data))
            if not taken[-1]:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(app, http=make_protocol(), log_config=None, server_header=False, date_header=False)
    config.load()
    made: Any = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})  # type: ignore[call-arg, operator]
    wire = Wire()
    made.connection_made(wire)
    for _ in range(1 if headers[1:] else 2):
        made.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.gather(*made.tasks)
        await asyncio.sleep(0)
    made.connection_lost(None)
    assert all(taken) == (short_way and not headers)
    return b"".join(wire.sent)


def test_writes_of_one_loop_iteration_are_sent_together() -> None:
    async def main() -> None:
        wire = Wire()
        joined = BatchedTransport(wire, WriteBatch(), lambda: False)  # type: ignore[arg-type]
        joined.write(b"a")
        joined.write(b"b")
        assert wire.sent == []
        await asyncio.sleep(0)
        assert wire.sent == [b"ab"]
        joined.write(b"c")
        joined.close()
        assert wire.sent == [b"ab", b"c"]
        joined.write(b"d")  # nobody is there any more
        await asyncio.sleep(0)
        assert (wire.sent, joined.is_closing()) == ([b"ab", b"c"], True)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/tokenize", "/v1/files", "/no/such/path"])
def test_a_client_that_keeps_sending_receives_the_refusal(locked: Running, path: str) -> None:
    """Ordinary clients send all of a body before they read: closing at once would reset the connection under them."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", locked.port)) as sock:
        sock.settimeout(PATIENCE)
        sock.sendall(f"{head}Content-Length: {64 << 20}\r\n\r\n".encode())
        assert b"413" in sock.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL)  # and yet:
        for _ in range(64):
            sock.sendall(b" " * (1 << 20))
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in answer


def test_bytes_read_after_a_refusal_are_bounded(locked: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.http.connection.MOST_DROPPED", 1 << 20)
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", locked.port)) as sock:
        sock.settimeout(PATIENCE)
        sock.sendall(f"{head}Content-Length: {1 << 40}\r\n\r\n".encode())
        with pytest.raises(OSError, match="reset|pipe"):
            sock.sendall(bytes(256 << 20))


def test_a_connection_ends_after_an_invalid_request() -> None:
    """Also if its client neither sends nor closes it."""
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(Running("no-model", begin=False, limits=Limits(body_seconds=0.2)))
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE))
        sock.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 200 + b"\r\n")
        assert b"".join(iter(lambda: sock.recv(65536), b"")).startswith(b"HTTP/1.1 431")
        until(lambda: not running.on_loop(lambda: running.server.server_state.connections))


def test_a_body_in_crumbs_is_refused(locked: Running) -> None:
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    chunked = f"{head}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
    assert b"the chunks of the body are smaller" in exchange(locked, chunked + b"1\r\n \r\n" * 1100 + b"0\r\n\r\n")
    assert b"the chunks of the body" not in exchange(locked, chunked + b"1\r\n \r\n" * 900 + b"0\r\n\r\n")


def test_idle_connections_are_closed_at_the_limit_and_health_answers() -> None:
    """More connections than there may be, none of which asks anything; one with a request that was admitted stays."""
    ask = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    limits = Limits(connections=8, header_seconds=PATIENCE)
    with Running("no-model", begin=False, limits=limits) as running, contextlib.ExitStack() as stack:

        def connect() -> socket.socket:
            made = stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            made.settimeout(PATIENCE)
            return made

        kept = connect()
        kept.sendall(ask)
        assert kept.recv(12) == b"HTTP/1.1 200"
        idle = [connect() for _ in range(300)]
        for _ in range(20):
            assert httpx.get(f"{running.base}/live", trust_env=False).status_code == 200
        assert running.on_loop(lambda: len(running.server.server_state.connections)) <= 8 + SPARE
        assert idle[0].recv(1) == b""  # it was closed
        kept.sendall(ask)
        while b"HTTP/1.1 200" not in (part := kept.recv(65536)):
            assert part


def test_a_handshake_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.constants.SSL_HANDSHAKE_TIMEOUT", 10 * PATIENCE)  # a minute otherwise
    here = Path(__file__).parent
    tls = {"tls_cert": str(here / "tls_cert.pem"), "tls_key": str(here / "tls_key.pem")}
    hasty = Running("no-model", begin=False, limits=Limits(header_seconds=0.2), **tls)  # type: ignore[arg-type]
    with hasty, socket.create_connection(("127.0.0.1", hasty.port)) as sock:
        sock.settimeout(PATIENCE)
        assert sock.recv(1) == b""


def test_the_file_limit_is_raised_for_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: made.append(limits))
    for soft, hard, expected in ((100, 5000, [(1344, 5000)]), (1344, 5000, []), (-1, -1, []), (100, -1, [(1344, -1)])):
        monkeypatch.setattr("resource.getrlimit", lambda kind, both=(soft, hard): both)
        made.clear()
        allow_files(ServerSettings("tiny"))
        assert made == expected
    monkeypatch.setattr("resource.getrlimit", lambda kind: (100, 1000))
    with pytest.raises(SettingsError, match="lower --limit-connections"):
        allow_files(ServerSettings("tiny"))
