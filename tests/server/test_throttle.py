"""Who is refused again and again waits for his answers, and nobody else does."""

import asyncio
import contextlib
import socket
import sys
import threading
from typing import Any

import pytest

from headrace.confined.pool import BILL, Confined, Task
from headrace.server import throttle as module
from headrace.server.guard import Guard
from headrace.server.keys import Keys
from headrace.server.settings import Limits, ServerSettings
from headrace.server.throttle import BURST, CLIENTS, FREE, HELD, LONGEST, Bill, Throttle
from tests.server.harness import PATIENCE, Running
from tests.unit import confined_tasks


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def throttle(clock: Clock) -> Throttle:
    return Throttle(0.05, clock, 2)


def test_in_the_long_run_a_client_has_its_part(throttle: Throttle, clock: Clock) -> None:
    """It asks for the next thing as soon as it has the answer to the last one, each of a tenth of a second."""
    done = 0
    while clock.now < 1000:
        throttle.charge("a", 0.1)
        clock.now += max(throttle.wait("a"), 1e-3)
        done += 1
    assert done * 0.1 == pytest.approx(0.05 * 2 * 1000 + BURST, rel=0.02)
    assert throttle.wait("b") == 0


def test_the_first_mistakes_cost_nothing_and_an_answer_comes_in_the_end(throttle: Throttle, clock: Clock) -> None:
    throttle.charge("a", BURST)
    assert throttle.wait("a") == 0
    throttle.charge("a", 0.1)
    assert throttle.wait("a") == pytest.approx(1.0)
    throttle.charge("a", 1000.0)
    assert throttle.wait("a") == LONGEST
    clock.now = 20_000.0
    assert throttle.wait("a") == 0


def test_only_clients_that_used_more_than_their_part_are_remembered(throttle: Throttle, clock: Clock) -> None:
    for number in range(3 * CLIENTS):
        throttle.charge(str(number), 0.01)
        clock.now += 1.0
    assert len(throttle._until) <= CLIENTS


def test_work_in_confined_processes_is_charged_beyond_what_is_free(throttle: Throttle) -> None:
    honest, costly = Bill(throttle, "honest"), Bill(throttle, "costly")
    for bill, seconds in ((honest, FREE / 4), (costly, 1.0)):
        for _ in range(3):
            bill.add(seconds)
    assert honest.charged == 0
    assert costly.charged == pytest.approx(3 - FREE)
    costly.refused()
    assert costly.charged > 3
    assert throttle.wait("honest") == 0 < throttle.wait("costly")


def test_threads_charge_at_once(throttle: Throttle) -> None:
    """Nothing of what several confined processes used is lost, nor charged twice."""
    bill, count = Bill(throttle, "a"), 2000
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [bill.add(0.25) for _ in range(count)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert bill.seconds == 4 * count * 0.25
    assert throttle._until["a"] == pytest.approx((bill.seconds - FREE) / throttle.part)


def test_confined_processes_say_what_they_used() -> None:
    pool = Confined(width=1)
    said: list[float] = []

    async def ask(function: str, value: Any) -> None:
        BILL.set(said.append)
        await pool.ask(Task(confined_tasks.__name__, function), value)

    try:
        asyncio.run(ask("echo", 1))
        asyncio.run(ask("echo", 1))
    finally:
        pool.close()
    first, second = said
    assert first > 0.01 > second >= 0  # who needs a new process pays for its start


async def answers(asked: list[tuple[str, str]], turns: int) -> list[int]:
    """Which of these requests (client, path) have been answered after so many turns of the event loop."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        status = 400 if scope["path"] == "/wrong" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    settings = ServerSettings("tiny", limits=Limits(overhead=0.001))
    guard = Guard(app, settings, Keys(settings), lambda status, principal: None)
    statuses: dict[int, int] = {}

    async def one(number: int, client: str, path: str) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            statuses.setdefault(number, message.get("status", 0))

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        await guard({"type": "http", "method": "POST", "path": path, "headers": headers, "client": (client, 1)}, receive, send)

    tasks = []
    for number, (client, path) in enumerate(asked):
        tasks.append(asyncio.create_task(one(number, client, path)))
        for _ in range(turns):
            await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not +guard.throttle.held
    return [statuses.get(number, 0) for number in range(len(asked))]


def test_refusals_wait_and_what_is_right_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BURST", 0.0)
    asked = [("a", "/wrong"), ("a", "/right"), ("b", "/right"), ("b", "/wrong")]
    assert asyncio.run(answers(asked, 20)) == [0, 200, 200, 0]
    monkeypatch.setattr(module, "BURST", BURST)
    assert asyncio.run(answers(asked, 20)) == [400, 200, 200, 400]


def test_so_many_answers_wait_then_the_client_hears_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BURST", 0.0)
    asked = [("a", "/wrong")] * (HELD + 2) + [("b", "/right"), ("a", "/health")]
    assert asyncio.run(answers(asked, 20)) == [0] * HELD + [429, 429, 200, 200]


def test_what_is_no_http_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose turn has not come hears nothing for a while, and is told in the end."""
    limits = Limits(overhead=0.001)
    with Running("no-model", begin=False, limits=limits) as server:
        assert b"400" in heard(server, b"no http\r\n\r\n", PATIENCE)
        monkeypatch.setattr(module, "BURST", 0.0)
        assert heard(server, b"no http\r\n\r\n", 0.2) == b""
        monkeypatch.setattr(module, "LONGEST", 0.01)
        assert b"400" in heard(server, b"no http\r\n\r\n", PATIENCE)


def heard(server: Running, data: bytes, seconds: float) -> bytes:
    """What comes back within so many seconds."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as client:
        client.sendall(data)
        with contextlib.suppress(TimeoutError):
            return client.recv(1000)
    return b""
