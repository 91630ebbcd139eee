"""A request refused from its first bytes gets the answer, the log line and the count of one that passes parser and guard."""

import re
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.server.http.guard import LARGEST, read_head
from headrace.server.settings import Limits
from tests.server.harness import PATIENCE, Running

KEY = "a-long-enough-key"
TLS = {"tls_cert": str(Path(__file__).with_name("tls_cert.pem")), "tls_key": str(Path(__file__).with_name("tls_key.pem"))}
# What differs between two equal answers.
VARYING = re.compile(rb"(?<=\r\ndate: )[^\r]*|(?<=x-request-id: req_)[0-9a-f]{24}|(?<=created.:)\d+")


def head(*lines: str, first: str = "GET /v1/models HTTP/1.1", host: str = "Host: localhost") -> bytes:
    return "".join(f"{line}\r\n" for line in (first, *filter(None, [host]), *lines, "")).encode("latin-1")


# The packets of each request, and whether a server without its key (K) and a server without keys (L) refuse it early.
PLAIN: dict[str, tuple[list[bytes], str]] = {
    "no key": ([head()], "K"),
    "wrong key": ([head("Authorization: Bearer wrong-wrong-wrong")], "K"),
    "wrong x-api-key": ([head("x-api-key: wrong-wrong-wrong")], "K"),
    "right key, wrong scheme": ([head(f"Authorization: Basic {KEY}")], "K"),
    "key without scheme": ([head(f"Authorization: {KEY}")], "K"),
    "key with spaces inside": ([head(f"Authorization: Bearer {KEY[:5]} {KEY[5:]}")], "K"),
    "wrong authorization, right x-api-key": ([head("Authorization: Bearer wrong", f"X-Api-Key: {KEY}")], "K"),
    "key as another header": ([head(f"X-Authorization: Bearer {KEY}")], "K"),
    "right key": ([head(f"Authorization: Bearer {KEY}")], ""),
    "right key, other case": ([head(f"AUTHORIZATION: bEaReR   {KEY}  ")], ""),
    "right x-api-key": ([head(f"X-API-KEY:\t{KEY}")], ""),
    "close": ([head("Connection: close")], "K"),
    "close, in a list": ([head("Connection: x , CLOSE")], "K"),
    "keep-alive": ([head("Connection: Keep-Alive")], "K"),
    "own name": ([head("X-Request-ID: abc.1")], "K"),
    "bad own name": ([head("X-Request-ID: a b")], "K"),
    "unknown path": ([head(first="GET /no%20such/path?a=%41&b HTTP/1.1")], "K"),
    "escaped path": ([head(first="GET /%6Cive HTTP/1.1")], ""),
    "twice escaped path": ([head(first="GET /%256Cive HTTP/1.1")], "K"),
    "not UTF-8": ([head(first="GET /%FF%0A HTTP/1.1")], "K"),
    "public path": ([head(first="GET /live?a HTTP/1.1")], ""),
    "other method": ([head(first="DELETE /live/ HTTP/1.1")], "K"),
    "a body": ([head("Content-Length: 2", first="POST /v1/completions HTTP/1.1") + b"{}"], "K"),
    "websocket": ([head("Connection: Upgrade", "Upgrade: WebSocket", "Origin: https://evil.example")], "KL"),
    "websocket, public path": ([head("Connection: Upgrade", "Upgrade: websocket", first="GET / HTTP/1.1")], "KL"),
    "page of another site": ([head("Origin: https://evil.example", first="GET /live HTTP/1.1")], "L"),
    "link of another site": ([head("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", first="GET / HTTP/1.1")], ""),
    "image of another site": ([head("Sec-Fetch-Site: cross-site", first="GET / HTTP/1.1")], "L"),
    "other host": ([head(host="Host: evil.example")], "KL"),
}
# Left to the parser, whoever refuses them.
UNUSUAL: dict[str, list[bytes]] = {
    "split": [head()[:20], head()[20:]],
    "split before the blank line": [head()[:-2], head()[-2:]],
    "right key in the second packet": [head()[:-2], f"Authorization: Bearer {KEY}\r\n\r\n".encode()],
    "folded": [head("Authorization: Bearer", f" {KEY}")],
    "key twice": [head("Authorization: Bearer wrong", f"Authorization: Bearer {KEY}")],
    "key twice, wrong last": [head(f"Authorization: Bearer {KEY}", "Authorization: Bearer wrong")],
    "two hosts": [head("Host: evil.example")],
    "no host": [head(host="")],
    "line feeds": [head().replace(b"\r\n", b"\n")],
    "carriage return in a value": [head("a: b\rc")],
    "other characters": [head("a: \xe9")],
    "no colon": [head("a")],
    "space before the colon": [head("a : b")],
    "absolute target": [head(first="GET http://localhost/live HTTP/1.1")],
    "absolute target, refused": [head(first="GET http://localhost/v1/models HTTP/1.1")],
    "HTTP/1.0": [head(first="GET /v1/models HTTP/1.0")],
    "HTTP/1.0 with keep-alive": [head("Connection: keep-alive", first="GET /v1/models HTTP/1.0")],
    "HEAD": [head(first="HEAD /v1/models HTTP/1.1")],
    "TRACE": [head(first="TRACE /v1/models HTTP/1.1")],
    "lower case": [head(first="get /v1/models HTTP/1.1")],
    "pipelined": [head() * 3],
    "pipelined with the key": [head() + head(f"Authorization: Bearer {KEY}")],
    "blank lines first": [b"\r\n\r\n" + head()],
    "a chunked body": [head("Transfer-Encoding: chunked", first="POST /v1/models HTTP/1.1") + b"1\r\na\r\n0\r\n\r\n"],
    "two lengths": [head("Content-Length: 1", "Content-Length: 1", first="POST /v1/models HTTP/1.1") + b"a"],
    "signed length": [head("Content-Length: +1", first="POST /v1/models HTTP/1.1") + b"a"],
    "a body that is awaited": [head("Expect: 100-continue", "Content-Length: 1", first="POST /x HTTP/1.1") + b"a"],
    "a large head": [head("a: " + "b" * LARGEST)],
    "many headers": [head(*["a: b"] * 101)],
    "no HTTP": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"],
}


class Watched:
    """A server that records which requests it refuses early, each status that it counts, and its log of refused requests.
    Without `early` it refuses none early."""

    def __init__(self, running: Running, early: bool) -> None:
        self.running = running
        self.protocol: Any = running.server.config.http_protocol_class
        self.early = 0
        self.counted: list[Any] = []
        self.logged: list[Any] = []
        running.server.config.timeout_keep_alive = 0  # so that each connection ends with its last answer
        guard: Any = running.server.config.app
        refuse = self.protocol.refuse  # type: ignore[attr-defined]

        def watched(*arguments: Any) -> bytes | None:
            answer = refuse(*arguments) if early else None
            self.early += answer is not None
            return answer  # type: ignore[no-any-return]

        self.protocol.refuse = staticmethod(watched)  # type: ignore[attr-defined]
        guard._count = lambda status, principal: self.counted.append((status, principal))
        guard._refused.add = lambda client, detail: self.logged.append((client, detail))

    def answer(self, packets: list[bytes]) -> tuple[bytes, list[Any], list[Any]]:
        """All bytes until the server closes the connection, the statuses that it counted, and its log of refused requests."""
        self.early, self.counted, self.logged = 0, [], []
        with socket.create_connection(("127.0.0.1", self.running.port), timeout=PATIENCE) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for number, packet in enumerate(packets):
                time.sleep(0.1 if number else 0)
                client.sendall(packet)
            return VARYING.sub(b"", b"".join(iter(lambda: client.recv(65536), b""))), self.counted, self.logged


@pytest.fixture(scope="module", params=["K", "L"], ids=["with a key", "without keys"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Watched, Watched, str]]:
    """Two equal servers, of which the second refuses nothing early."""
    settings = {"key": KEY if request.param == "K" else None, "limits": Limits(header_seconds=PATIENCE)}
    with Running("no-model", begin=False, **settings) as first, Running("no-model", begin=False, **settings) as second:
        yield Watched(first, True), Watched(second, False), request.param


@pytest.mark.parametrize("name", PLAIN)
def test_plain_requests_are_refused_early_with_the_same_bytes(pair: tuple[Watched, Watched, str], name: str) -> None:
    packets, kinds = PLAIN[name]
    if name == "other host" and pair[2] == "K":
        kinds = "K"
    answer = pair[0].answer(packets)
    assert answer == pair[1].answer(packets)
    assert answer[0].startswith(b"HTTP/1.1 ")
    assert pair[0].early == (pair[2] in kinds)
    assert len(answer[2]) == pair[0].early


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_requests_are_left_to_the_parser(pair: tuple[Watched, Watched, str], name: str) -> None:
    assert pair[0].answer(UNUSUAL[name]) == pair[1].answer(UNUSUAL[name])
    assert pair[0].early == 0


def test_over_tls() -> None:
    context = ssl._create_unverified_context()
    with Running("no-model", begin=False, key=KEY, **TLS) as running:
        watched = Watched(running, True)
        for sent, status in ((head(), b"401"), (head(f"X-Api-Key: {KEY}", "Connection: close"), b"200")):
            with context.wrap_socket(socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE)) as client:
                client.sendall(sent)
                assert b"".join(iter(lambda: client.recv(65536), b""))[9:12] == status
        assert watched.early == 1


def test_a_smaller_limit_of_the_head_holds() -> None:
    """The parser refuses what is longer."""
    assert read_head(head(), len(head())) is not None
    assert read_head(head(), len(head()) - 1) is None


def test_a_connection_without_a_request_ends_with_the_server() -> None:
    with Running("no-model", begin=False, key=KEY) as running:
        idle = socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE)
        while running.on_loop(lambda: len(running.server.server_state.connections)) == 0:
            time.sleep(0.01)
        running.on_loop(lambda: setattr(running.server, "should_exit", True))
        assert idle.recv(1) == b""
        idle.close()
