"""Pace of refusals: while models generate, a client with many refused requests waits for the answers to them."""

import asyncio
import time
from collections.abc import Callable

BURST = 20  # refusals of one client without a wait
RATE = 10.0  # further refusals a second
LONGEST = 2.0  # longest wait, seconds
MOST = 256  # waiting refusals; any more are answered without a wait


class RefusalPace:
    """Delays refusals to clients that repeat refused requests. Owned by the event loop.

    A refusal costs CPU time that the engines need, and a client repeats its request when it has the answer. The wait slows down
    such clients alone: no accepted request waits, and a waiting refusal counts for no limit of requests. No refusal waits while
    the engines have no request (`busy` is false). A client is a principal, by its name; the name "" stands for all clients that
    have not shown a valid key.

    Source: generic cell rate algorithm, ATM Forum 1996.
    """

    def __init__(self, busy: Callable[[], bool] = bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.busy = busy
        self._clock = clock
        self._paid: dict[str, float] = {}  # by client: the time at which its refusals so far are within the rate
        self._waiting = 0

    def answer(self, client: str, write: Callable[[], None]) -> None:
        """Call `write`, which sends a refusal to `client`: now, or later if the client is over its rate."""
        seconds = self._wait(client) if self.busy() else 0.0
        if seconds <= 0 or self._waiting >= MOST:
            write()
            return
        self._waiting += 1
        asyncio.get_running_loop().call_later(seconds, self._end, write)

    async def turn(self, client: str) -> None:
        """Wait until a refusal of `client` may be sent."""
        event = asyncio.Event()
        self.answer(client, event.set)
        await event.wait()

    def _wait(self, client: str) -> float:
        """Count a refusal; return the seconds that it waits."""
        now = self._clock()
        paid = max(now, self._paid.get(client, now)) + 1 / RATE
        # The count is capped: no refusal waits longer than LONGEST.
        self._paid[client] = min(paid, now + BURST / RATE + LONGEST)
        return self._paid[client] - now - BURST / RATE

    def _end(self, write: Callable[[], None]) -> None:
        self._waiting -= 1
        write()
