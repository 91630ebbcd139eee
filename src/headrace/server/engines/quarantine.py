"""Requests that were running when the engine crashed.

After one crash a request may run again, but only one such request at a time until it has one token more than at the crash, so
that the next crash shows the cause. After MOST_CRASHES it is refused.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from headrace.server.engines.messages import Submit

MOST_CRASHES = 2
KEPT = 3600.0  # seconds for which a request is remembered
MOST = 4096  # remembered requests


@dataclass(slots=True)
class Suspect:
    """State of a request at the last crash. `ends`: crashes; `reached`: generated tokens; `until`: when it is forgotten."""

    ends: int
    reached: int
    until: float


class Quarantine:
    """Remembers requests by their content, as clients repeat requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, Suspect] = OrderedDict()  # the latest at the end

    @property
    def banned(self) -> int:
        """Number of requests that are refused."""
        self._forget()
        return sum(suspect.ends >= MOST_CRASHES for suspect in self._known.values())

    def find(self, message: Submit) -> Suspect | None:
        """Return the record of a request; None if no crash of it is remembered."""
        if not self._known:
            return None
        self._forget()
        return self._known.get(_name(message))

    def ended_under(self, requests: Iterable[tuple[Submit, int]]) -> None:
        """Record a crash: the requests that the engine had, each with its number of generated tokens.

        Equal requests have one record; a crash counts once.
        """
        for name, reached in {_name(message): reached for message, reached in requests}.items():
            before = self._known.pop(name, None)
            self._known[name] = Suspect(1 + (before.ends if before else 0), reached, self._clock() + KEPT)
        while len(self._known) > MOST:
            self._known.popitem(last=False)

    def clear(self, message: Submit) -> None:
        """Forget a request that has ended, or has more tokens than at the crash."""
        self._known.pop(_name(message), None)

    def _forget(self) -> None:
        now = self._clock()
        while self._known and next(iter(self._known.values())).until <= now:
            self._known.popitem(last=False)


def _name(message: Submit) -> bytes:
    """Hash of prompt, parameters, salt, pooling, alignment and source."""
    source = b"" if message.source is None else message.source.digest
    parts = message.prompt, message.params, message.salt, message.pool, message.align, source
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()
