"""Requests under which the engine ended. One that it ended under once is let in again, but only one such at a time, so that it
shows which of them it was; one that it ended under twice is not tried a third time."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from headrace.server.engines.messages import Submit

MOST_CRASHES = 2  # ends of the engine
KEPT = 3600.0  # seconds that a request is remembered for
MOST = 4096  # requests that are remembered


@dataclass(slots=True)
class Suspect:
    """A request as it was when the engine last ended under it. `reached`: tokens it had."""

    ends: int
    reached: int
    until: float


class Quarantine:
    """Remembers requests by what they ask for, as clients send the same one again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, Suspect] = OrderedDict()  # the latest at the end

    @property
    def banned(self) -> int:
        """How many requests are not tried again."""
        self._forget()
        return sum(suspect.ends >= MOST_CRASHES for suspect in self._known.values())

    def find(self, asked: Submit) -> Suspect | None:
        """What is known of a request; None where the engine did not end under it, or that is forgiven."""
        if not self._known:
            return None
        self._forget()
        return self._known.get(_name(asked))

    def ended_under(self, requests: Iterable[tuple[Submit, int]]) -> None:
        """The engine ended while it had these, which had so many tokens."""
        for asked, reached in requests:
            name = _name(asked)
            before = self._known.pop(name, None)
            self._known[name] = Suspect(1 + (before.ends if before else 0), reached, self._clock() + KEPT)
        while len(self._known) > MOST:
            self._known.popitem(last=False)

    def clear(self, asked: Submit) -> None:
        """It ended well, or has come further than where the engine ended under it."""
        self._known.pop(_name(asked), None)

    def _forget(self) -> None:
        now = self._clock()
        while self._known and next(iter(self._known.values())).until <= now:
            self._known.popitem(last=False)


def _name(asked: Submit) -> bytes:
    """The same for the same prompt, parameters and tenant."""
    return hashlib.sha256(msgspec.msgpack.encode((asked.prompt, asked.params, asked.salt, asked.pool))).digest()
