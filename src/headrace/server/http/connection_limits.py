"""Limits on the number of open connections: which connection closes to make room for another."""

import time
from collections.abc import Callable
from typing import Protocol

GRACE = 1.0  # seconds in which the limit of its address closes no new connection: its request may not have arrived


class TrackedConnection(Protocol):
    """A connection in the table."""

    address: str  # of the client

    def abort(self) -> None:
        """Close the connection now, without an answer."""


class ConnectionTable:
    """All connections of one server, at most `most`.

    A connection is anonymous until the server admits a request on it: one with a valid key, or, on a server without keys, one
    that is not refused. An address may have `anonymous` of these; one more closes its oldest. Above `most`, the table closes
    the oldest anonymous connection of the address with the most of them, then the admitted connection that has been idle for
    the longest time. It never closes an admitted connection with a request.
    """

    def __init__(self, most: int, anonymous: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._limit = anonymous
        self._clock = clock
        self._all: set[TrackedConnection] = set()
        self._anonymous: dict[
            str, dict[TrackedConnection, float]
        ] = {}  # by address: start time of each connection, oldest first
        self._idle: dict[TrackedConnection, None] = {}  # admitted, without a request; idle for the longest time first

    def add(self, connection: TrackedConnection, limited: bool = True) -> None:
        """Add a new connection. `limited`: the limit of its address applies."""
        now = self._clock()
        self._all.add(connection)
        group = self._anonymous.setdefault(connection.address, {})
        group[connection] = now
        while limited and len(group) > self._limit and now - group[oldest := next(iter(group))] >= GRACE:
            self._close(oldest)
        while len(self._all) > self.most and (victim := self._victim(connection)) is not None:
            self._close(victim)

    def admit(self, connection: TrackedConnection) -> None:
        """Mark a connection as admitted."""
        group = self._anonymous.get(connection.address, {})
        if group.pop(connection, None) is not None and not group:
            del self._anonymous[connection.address]

    def mark_busy(self, connection: TrackedConnection) -> None:
        """Mark a connection as one with a request."""
        self._idle.pop(connection, None)

    def mark_idle(self, connection: TrackedConnection) -> None:
        """Mark a connection as one without a request."""
        if connection in self._all and connection not in self._anonymous.get(connection.address, ()):
            self._idle[connection] = None

    def remove(self, connection: TrackedConnection) -> None:
        """Remove a connection that has ended."""
        self._all.discard(connection)
        self._idle.pop(connection, None)
        self.admit(connection)

    def _victim(self, newest: TrackedConnection) -> TrackedConnection | None:
        """Return the connection to close in favour of `newest`, if there is connection."""
        group = max(self._anonymous.values(), key=len)
        oldest = next(iter(group))
        return oldest if oldest is not newest else next(iter(self._idle), None)

    def _close(self, connection: TrackedConnection) -> None:
        self.remove(connection)
        connection.abort()
