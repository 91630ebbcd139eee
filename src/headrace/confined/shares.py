"""Each client's share of CPU time in confined processes at normal priority."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace import host

SHARE = 0.03  # fraction of all processors for one client
BURST = 1.0  # seconds of CPU time that a client may use ahead of its share
FREE = 0.005  # seconds of each question that are not charged: templates of ordinary chats take less
CLIENTS = 4096  # above this number, clients without a debt are forgotten


@dataclass(eq=False, slots=True)
class CpuShares:
    """CPU time that clients have used beyond their share.

    Each client has a time until which its share is used up (generic cell rate algorithm, ATM Forum 1996). A client over its
    share is neither delayed nor refused: the pool runs its questions at idle priority, in three quarters of the processes.
    """

    rate: float = field(default_factory=lambda: SHARE * host.cores())  # seconds of CPU time a second
    clock: Callable[[], float] = time.monotonic
    _until: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def charge(self, client: str, seconds: float) -> None:
        """Charge a client for `seconds` of CPU time. The empty name is this program itself, which has no limit."""
        if seconds <= FREE or not client:
            return
        with self._lock:
            now = self.clock()
            if len(self._until) >= CLIENTS:
                self._until = {name: until for name, until in self._until.items() if until > now}
            self._until[client] = max(now, self._until.get(client, now)) + (seconds - FREE) / self.rate

    def used_up(self, client: str) -> bool:
        """Return whether a client is over its share, including BURST."""
        return self._until.get(client, 0.0) - self.clock() > BURST / self.rate
