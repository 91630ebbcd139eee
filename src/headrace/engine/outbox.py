"""Deltas to be delivered, with the last one of each request."""

from collections.abc import Iterable

from headrace.data.types import Delta


class Outbox:
    """The deltas of one or more steps, in order. The last delta of a request is found in constant time."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._last: dict[str, Delta] = {}

    def __len__(self) -> int:
        return len(self._deltas)

    def append(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._last[delta.request_id] = delta

    def extend(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            self.append(delta)

    def last_of(self, request_id: str) -> Delta | None:
        """The last delta of a request in this outbox."""
        return self._last.get(request_id)

    def take(self) -> list[Delta]:
        """Remove and return all deltas."""
        deltas, self._deltas, self._last = self._deltas, [], {}
        return deltas
