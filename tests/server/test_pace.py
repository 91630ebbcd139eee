"""Clients that repeat refused requests wait for the answers while models generate; other requests never do."""

import asyncio
import contextlib
import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.server.http.pace import CLIENTS, PUBLIC, REFUSALS, Pace, Rate
from headrace.server.settings import Limits
from tests.server.harness import PATIENCE, Running, until
from tests.server.test_connection_limits import Clock

KEY = "a-long-enough-key"
BURST, RATE, LONGEST, MOST = REFUSALS.burst, REFUSALS.rate, REFUSALS.longest, REFUSALS.most
SLOW = Rate(burst=1, rate=1 / PATIENCE, longest=PATIENCE, most=1000)  # the second answer waits longer than the test
WRONG_KEY = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong-wrong\r\n\r\n"
SPLIT_KEY = [WRONG_KEY[:30], WRONG_KEY[30:]]  # reaches the parser
RIGHT_KEY = WRONG_KEY.replace(b"wrong-wrong", KEY.encode())
MANY_HEADERS = b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 15_000 + b"\r\n"
MISTAKE = RIGHT_KEY.replace(b"GET /v1/models", b"GET /no/such/path")
BAD_BODY = RIGHT_KEY.replace(b"GET /v1/models", b"POST /tokenize")[:-2] + b"Content-Length: 1\r\n\r\n{"
# Packets of a refused request, its status, and whether its client has a valid key.
REFUSED: dict[str, tuple[list[bytes], bytes, bool]] = {
    "wrong key": ([WRONG_KEY], b"401", False),
    "wrong key in two packets": (SPLIT_KEY, b"401", False),
    "headers": ([MANY_HEADERS], b"431", False),
    "no HTTP": ([b"\x16\x03\x01\r\n\r\n"], b"400", False),
    "mistake": ([MISTAKE], b"404", True),
    "bad body": ([BAD_BODY], b"400", True),
}


def waits(pace: Pace, client: str, count: int) -> list[float]:
    return [max(0.0, round(pace._wait(client), 6)) for _ in range(count)]


def test_above_the_burst_refusals_leave_at_the_rate() -> None:
    clock = Clock()
    pace = Pace(lambda: True, clock=clock)
    assert waits(pace, "a", BURST) == [0.0] * BURST
    assert waits(pace, "a", 3) == pytest.approx([1 / RATE, 2 / RATE, 3 / RATE])
    assert waits(pace, "b", 1) == [0.0]
    clock.now += 3 / RATE
    assert waits(pace, "a", 1) == pytest.approx([1 / RATE])
    clock.now += 1 / RATE + BURST / RATE
    assert waits(pace, "a", BURST + 1)[-2:] == pytest.approx([0.0, 1 / RATE])


def test_no_refusal_waits_longer_than_the_limit() -> None:
    """Nor does a client that was far over its rate owe more than that."""
    clock = Clock()
    pace = Pace(lambda: True, clock=clock)
    assert max(waits(pace, "a", 1000)) == LONGEST
    clock.now += LONGEST + 1 / RATE
    assert waits(pace, "a", 1) == [0.0]


def test_refusals_wait_only_while_engines_are_busy_and_up_to_a_maximum() -> None:
    async def main() -> None:
        answered: list[int] = []
        busy = False
        pace = Pace(lambda: busy)
        for number in range(1000):
            pace.answer("a", lambda number=number: answered.append(number))  # type: ignore[misc]
        assert len(answered) == 1000
        busy = True
        for number in range(BURST + MOST + 7):
            pace.answer("a", lambda number=number: answered.append(number))  # type: ignore[misc]
        assert len(answered) == 1000 + BURST + 7
        await asyncio.sleep(LONGEST + 0.1)
        assert len(answered) == 1000 + BURST + MOST + 7
        assert pace._waiting == 0

    asyncio.run(main())


def test_clients_without_a_wait_are_forgotten() -> None:
    clock = Clock()
    pace = Pace(lambda: True, PUBLIC, clock)
    assert waits(pace, "a", PUBLIC.burst + 1)[-1] > 0
    for number in range(CLIENTS):
        waits(pace, str(number), 1)
        clock.now += 1e-3 / CLIENTS
    assert waits(pace, "a", 1)[0] > 0
    clock.now += PUBLIC.burst / PUBLIC.rate + PUBLIC.longest
    for number in range(2 * CLIENTS):
        waits(pace, f"{number} later", 1)
        clock.now += 1 / PUBLIC.rate
    assert len(pace._paid) <= CLIENTS


@pytest.fixture
def server() -> Iterator[Running]:
    """A server whose refusals, and public answers, above the first wait longer than the test."""
    limits = Limits(header_seconds=PATIENCE, body_seconds=PATIENCE)
    with Running("no-model", begin=False, key=KEY, limits=limits) as running:
        guard: Any = running.server.config.app
        for pace in (guard.pace, guard.public_pace):
            pace.busy = lambda: True
        guard.pace.rate = SLOW
        yield running


def connect(server: Running, packets: list[bytes], source: str = "127.0.0.1") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE, source_address=(source, 0))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for packet in packets:
        client.sendall(packet)
        server.on_loop(lambda: None)
    return client


@pytest.mark.parametrize("name", REFUSED)
def test_a_valid_key_does_not_wait_behind_refusals(server: Running, name: str) -> None:
    """They wait after the first; requests that the server accepts, of the same client too, are answered meanwhile."""
    packets, status, keyed = REFUSED[name]
    guard: Any = server.server.config.app
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(connect(server, packets))
        assert first.recv(12) == b"HTTP/1.1 " + status
        clients = [stack.enter_context(connect(server, packets)) for _ in range(40)]
        until(lambda: server.on_loop(lambda: guard.pace._waiting) == 40)
        for _ in range(20):
            assert server.http.get("/v1/models").status_code == 200
            assert server.http.get("/live").status_code == 200
        assert select.select(clients, [], [], 0)[0] == []
        assert server.on_loop(guard._open.total) == 0
        # The other kind of client has a pace of its own.
        other = stack.enter_context(connect(server, [WRONG_KEY if keyed else MISTAKE]))
        assert other.recv(12) == b"HTTP/1.1 " + (b"401" if keyed else b"404")


@pytest.mark.parametrize("name", REFUSED)
def test_idle_engines_answer_all_refusals_at_once(server: Running, name: str) -> None:
    packets, status, _ = REFUSED[name]
    guard: Any = server.server.config.app
    guard.pace.busy = lambda: False
    with contextlib.ExitStack() as stack:
        for client in [stack.enter_context(connect(server, packets)) for _ in range(40)]:
            assert client.recv(12) == b"HTTP/1.1 " + status


@pytest.mark.parametrize("name", REFUSED)
def test_a_delayed_refusal_is_complete_and_survives_a_disconnect(server: Running, name: str) -> None:
    packets, status, _ = REFUSED[name]
    guard: Any = server.server.config.app
    with connect(server, packets) as first:
        at_once = first.recv(65536)
    guard.pace.rate = Rate(burst=1, rate=10.0, longest=0.2, most=1000)
    server.on_loop(guard.pace._paid.clear)
    with connect(server, packets) as second, connect(server, packets) as third, connect(server, packets) as gone:
        gone.close()
        answers = [second.recv(65536), third.recv(65536)]
    assert {len(answer) for answer in answers} == {len(at_once)}
    assert all(answer.startswith(b"HTTP/1.1 " + status) for answer in answers)
    until(lambda: server.on_loop(lambda: guard.pace._waiting) == 0)
    assert server.http.get("/live").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/page/inter.woff2"])
def test_public_answers_wait_for_the_address_that_repeats_them(server: Running, path: str) -> None:
    """Other addresses, requests with a key, and refusals do not wait behind them."""
    guard: Any = server.server.config.app
    guard.public_pace.rate = SLOW
    packets = [f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(connect(server, packets))
        status = first.recv(12)
        clients = [stack.enter_context(connect(server, packets)) for _ in range(40)]
        until(lambda: server.on_loop(lambda: guard.public_pace._waiting) == 40)
        assert select.select(clients, [], [], 0)[0] == []
        assert server.http.get("/v1/models").status_code == 200
        for others in (connect(server, packets, "127.0.0.2"), connect(server, [WRONG_KEY])):
            assert stack.enter_context(others).recv(12) in (status, b"HTTP/1.1 401")
        guard.public_pace.busy = lambda: False
        assert stack.enter_context(connect(server, packets)).recv(12) == status


def test_without_the_pace_all_refusals_are_answered_at_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test of a valid key sees comes from the pace."""
    monkeypatch.setattr(Pace, "_wait", lambda self, client: 0.0)
    with contextlib.ExitStack() as stack:
        for client in [stack.enter_context(connect(server, [WRONG_KEY])) for _ in range(40)]:
            assert client.recv(12) == b"HTTP/1.1 401"
