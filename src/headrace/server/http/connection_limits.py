"""Open connections of a server: how many there may be, and which are closed to make room for others."""

import time
from collections.abc import Callable
from typing import Protocol

GRACE = 1.0  # seconds in which the limit of its address closes no new connection: its request may still be on its way


class TrackedConnection(Protocol):
    """A connection, as far as the crowd knows it."""

    address: str  # of the client

    def abort(self) -> None:
        """Close it now, without an answer."""


class ConnectionTable:
    """All connections of one server, at most `most`.

    A connection is anonymous until the server has admitted a request on it: one with a valid key, or, on a server without
    keys, one that is not refused. An address may have `anonymous` of these; one more closes its oldest. Beyond `most`, the
    oldest anonymous connection of the address with the most of them is closed, then the admitted connection that has waited
    longest for its next request. An admitted connection with a request is never closed.
    """

    def __init__(self, most: int, anonymous: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._limit = anonymous
        self._clock = clock
        self._all: set[TrackedConnection] = set()
        self._anonymous: dict[
            str, dict[TrackedConnection, float]
        ] = {}  # by address: its connections and when each began, oldest first
        self._idle: dict[TrackedConnection, None] = {}  # admitted, without a request; the one that waits longest comes first

    def enter(self, one: TrackedConnection, limited: bool = True) -> None:
        """Add a new connection. `limited`: the limit of its address applies."""
        now = self._clock()
        self._all.add(one)
        group = self._anonymous.setdefault(one.address, {})
        group[one] = now
        while limited and len(group) > self._limit and now - group[oldest := next(iter(group))] >= GRACE:
            self._close(oldest)
        while len(self._all) > self.most and (victim := self._victim(one)) is not None:
            self._close(victim)

    def admit(self, one: TrackedConnection) -> None:
        """A request on this connection was admitted."""
        group = self._anonymous.get(one.address, {})
        if group.pop(one, None) is not None and not group:
            del self._anonymous[one.address]

    def work(self, one: TrackedConnection) -> None:
        """The connection has a request."""
        self._idle.pop(one, None)

    def wait(self, one: TrackedConnection) -> None:
        """The connection has no request any more."""
        if one in self._all and one not in self._anonymous.get(one.address, ()):
            self._idle[one] = None

    def leave(self, one: TrackedConnection) -> None:
        """The connection has ended."""
        self._all.discard(one)
        self._idle.pop(one, None)
        self.admit(one)

    def _victim(self, newest: TrackedConnection) -> TrackedConnection | None:
        """The connection to close in favour of `newest`, if there is one."""
        group = max(self._anonymous.values(), key=len)
        oldest = next(iter(group))
        return oldest if oldest is not newest else next(iter(self._idle), None)

    def _close(self, one: TrackedConnection) -> None:
        self.leave(one)
        one.abort()
