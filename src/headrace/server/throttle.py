"""What clients' requests cost this process beside the engine's work, and how long their answers wait for that."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.native import processors

REFUSAL = 0.002  # seconds of CPU time that a request costs which is refused
BYTE = 15e-9  # seconds besides for each byte of its body
CHUNK = 30e-6  # and for each chunk of one that is sent in chunks
FREE = 0.005  # seconds in confined processes that any request may take
BURST = 1.0  # seconds that a client may have taken ahead
LONGEST = 30.0  # seconds that an answer waits at most
HELD = 32  # answers of one client that wait; they keep what was sent
CLIENTS = 4096  # that are remembered, besides those that have used more than their part


@dataclass(eq=False, slots=True)
class Throttle:
    """One client's refused and costly requests take no more than `share` of the processors, in the long run.

    Each client has a time until which it has used its part (generic cell rate algorithm, ATM Forum 1996). A request that moves
    this time is answered when it is near; all others of the client wait for nothing. So who makes a mistake is told at once,
    and who asks again and again for what is refused waits longer and longer.
    """

    share: float
    clock: Callable[[], float] = time.monotonic
    processors: int = field(default_factory=processors)  # that the server may use
    held: Counter[str] = field(default_factory=Counter)  # answers that wait, by client
    _until: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def part(self) -> float:
        """Processors of one client."""
        return self.share * self.processors

    def charge(self, client: str, seconds: float) -> None:
        """A client has used so much CPU time. From any thread."""
        with self._lock:
            now = self.clock()
            if len(self._until) >= CLIENTS:
                self._until = {name: until for name, until in self._until.items() if until > now}
            self._until[client] = max(now, self._until.get(client, now)) + seconds / self.part

    def wait(self, client: str) -> float:
        """Seconds that an answer has to wait."""
        return min(LONGEST, max(0.0, self._until.get(client, 0.0) - self.clock() - BURST / self.part))

    def refuse(self, client: str, chunks: int) -> float:
        """What a client sent is no HTTP: seconds that it waits for this answer."""
        self.charge(client, REFUSAL + CHUNK * chunks)
        return self.wait(client)

    def full(self, client: str) -> bool:
        """Whether so many answers wait that there may be no more."""
        return self.held[client] >= HELD


@dataclass(eq=False, slots=True)
class Bill:
    """What one request has cost beside the engine's work. Confined processes add to it from other threads."""

    throttle: Throttle
    client: str
    size: int = 0  # bytes of its body
    seconds: float = 0.0  # in confined processes
    charged: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, seconds: float) -> None:
        """So much CPU time of a confined process was used."""
        with self._lock:
            self.seconds += seconds
            self._charge(self.seconds - FREE)

    def refused(self) -> None:
        """What was asked for is refused."""
        with self._lock:
            self._charge(self.seconds + REFUSAL + BYTE * self.size)

    async def settle(self) -> None:
        """Wait until it may be answered."""
        if self.charged and (wait := self.throttle.wait(self.client)):
            self.throttle.held[self.client] += 1
            try:
                await asyncio.sleep(wait)
            finally:
                self.throttle.held -= Counter([self.client])

    def _charge(self, total: float) -> None:
        if (more := total - self.charged) > 0:
            self.charged += more
            self.throttle.charge(self.client, more)
