"""Pace of cheap answers: while models generate, a client with many refused or public requests waits for the answers."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

CLIENTS = 1024  # clients that a pace knows before it forgets those without a wait


@dataclass(frozen=True, slots=True)
class Rate:
    """Answers to one client."""

    burst: int  # without a wait
    rate: float  # further ones a second
    longest: float  # longest wait, seconds
    most: int  # waiting answers of all clients; any more are given without a wait


REFUSALS = Rate(burst=20, rate=10.0, longest=2.0, most=256)
# Of probes and files of the page. A monitor at the address of a client with 8 connections waits 80 ms.
PUBLIC = Rate(burst=100, rate=100.0, longest=1.0, most=1024)


class Pace:
    """Delays answers to clients that repeat cheap requests: refused ones, or public ones. Owned by the event loop.

    Such an answer costs CPU time that the engines need, and a client repeats its request when it has the answer. The wait slows
    down such clients alone. Nothing waits while the engines have no request (`busy` is false).

    Source: generic cell rate algorithm, ATM Forum 1996.
    """

    def __init__(
        self,
        busy: Callable[[], bool] = bool,
        rate: Rate = REFUSALS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.busy = busy
        self.rate = rate
        self._clock = clock
        self._paid: dict[str, float] = {}  # by client: the time at which its answers so far are within the rate
        self._forget_at = CLIENTS  # size of `_paid`
        self._waiting = 0

    def answer(self, client: str, write: Callable[[], None]) -> None:
        """Call `write`, which answers `client`: now, or later if the client is over its rate."""
        seconds = self._wait(client) if self.busy() else 0.0
        if seconds <= 0 or self._waiting >= self.rate.most:
            write()
            return
        self._waiting += 1
        asyncio.get_running_loop().call_later(seconds, self._end, write)

    async def turn(self, client: str) -> None:
        """Wait until `client` may be answered."""
        event = asyncio.Event()
        self.answer(client, event.set)
        await event.wait()

    def _wait(self, client: str) -> float:
        """Count an answer; return the seconds that it waits."""
        now, rate = self._clock(), self.rate
        if len(self._paid) >= self._forget_at:
            self._paid = {name: paid for name, paid in self._paid.items() if paid > now}
            self._forget_at = max(CLIENTS, 2 * len(self._paid))
        paid = max(now, self._paid.get(client, now)) + 1 / rate.rate
        # The count is capped: no answer waits longer than `longest`.
        self._paid[client] = min(paid, now + rate.burst / rate.rate + rate.longest)
        return self._paid[client] - now - rate.burst / rate.rate

    def _end(self, write: Callable[[], None]) -> None:
        self._waiting -= 1
        write()
