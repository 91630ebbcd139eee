"""All arriving request bodies share one memory bound; above it the client with the most bytes loses its oldest body."""

import asyncio
from typing import Any

import pytest

from headrace.confined.pool import CLIENT
from headrace.server.http.api_error import ApiError
from headrace.server.http.bodies import BodyMemory
from headrace.server.settings import Limits, ServerSettings, SettingsError

LIMIT, SECONDS = 40, 3600.0


class Sender:
    """Sends a body in pieces of ten bytes, each when it is told to."""

    def __init__(self, bodies: BodyMemory, client: str) -> None:
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        CLIENT.set(client)
        self.task = asyncio.create_task(bodies.read(self._parts.get, LIMIT, SECONDS))

    async def send(self, count: int = 1, last: bool = False) -> None:
        for number in range(count):
            self._parts.put_nowait({"type": "http.request", "body": b"x" * 10, "more_body": not last or number < count - 1})
        for _ in range(5 * count):
            await asyncio.sleep(0)

    def disconnect(self) -> None:
        self._parts.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int | None:
        """None: the body is still arriving; 200: it has arrived."""
        if not self.task.done():
            return None
        error = self.task.exception()
        assert error is None or isinstance(error, ApiError)
        return 200 if error is None else error.status


def test_a_body_arrives_whole() -> None:
    async def main() -> None:
        bodies = BodyMemory(100)
        one = Sender(bodies, "a")
        await one.send(3)
        assert (one.status, bodies.size) == (None, 30)
        await one.send(last=True)
        assert (await one.task, bodies.size, bodies._bodies) == (b"x" * 40, 0, {})

    asyncio.run(main())


def test_truncated_and_oversized_bodies_free_their_bytes() -> None:
    async def main() -> None:
        bodies = BodyMemory(100)
        gone, large = Sender(bodies, "a"), Sender(bodies, "b")
        await gone.send()
        gone.disconnect()
        await large.send(5)
        assert (gone.status, large.status, bodies.size, bodies._bodies) == (400, 413, 0, {})

    asyncio.run(main())


def test_unfinished_bodies_of_the_largest_client_are_dropped_first() -> None:
    """The attacker has the most bytes, so its oldest body is refused each time; the other client's bodies all arrive."""

    async def main() -> None:
        bodies = BodyMemory(100)
        attack = [Sender(bodies, "attacker") for _ in range(5)]
        for one in attack:
            await one.send(2)
        honest = [Sender(bodies, "honest") for _ in range(2)]
        for one in honest:
            await one.send(2)
        assert bodies.size <= 100
        for one in honest:
            await one.send(2, last=True)
        assert [one.status for one in honest] == [200, 200]
        assert [one.status for one in attack] == [503, 503, 503, None, None]
        error = attack[0].task.exception()
        assert isinstance(error, ApiError)
        assert (error.code, error.retry_after) == ("too_many_bytes", 1)
        for one in attack[3:]:
            one.disconnect()
            await one.send()
        assert ([one.status for one in attack[3:]], bodies.size) == ([400, 400], 0)

    asyncio.run(main())


def test_of_one_client_newer_bodies_arrive() -> None:
    """As of all programs of one machine."""

    async def main() -> None:
        bodies = BodyMemory(100)
        attack = [Sender(bodies, "a") for _ in range(5)]
        for one in attack:
            await one.send(2)
        new = Sender(bodies, "a")
        await new.send(4, last=True)
        assert [one.status for one in (*attack, new)] == [503, 503, None, None, None, 200]
        for one in attack[2:]:
            one.disconnect()
        await new.send()
        assert ([one.status for one in attack[2:]], bodies.size) == ([400, 400, 400], 0)

    asyncio.run(main())


def test_a_bound_below_the_largest_body_is_refused_at_the_start() -> None:
    with pytest.raises(SettingsError, match="--limit-bodies 99 is less than --limit-body 100"):
        ServerSettings("tiny", limits=Limits(body=100, bodies=99))
