"""Compiles grammars in threads next to the engine's loop; their requests enter the engine afterwards."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from headrace.data.structured import StructuredOutputs
from headrace.decoding.constrained import Constraint, Grammars
from headrace.server.engines.messages import Submit

CHEAP_SECONDS = 0.05  # CPU time of a cheap grammar
CHEAP_THREADS, COSTLY_THREADS = 2, 1
# A compilation stops a compute thread, and so the step of all of them. While requests run, the next costly grammar starts this
# many times the CPU time of the last one after its start. (A thread of low priority would stop the engine for longer: it needs
# the interpreter's lock, and gets no processor while it holds it.)
COSTLY_PERIOD = 20.0
LARGE = 1 << 20  # bytes of a compiled grammar that counts as large
MOST_LARGE = 256 << 20  # bytes of all large grammars of open requests

Compilation = tuple[Submit, "Future[Constraint]"]


class GrammarQueue:
    """Grammars of one engine's requests. Only grammars with a known cost come here; each takes about a second of CPU time at
    most. The request with the smallest `turn` starts first. Grammars above `CHEAP_SECONDS` are compiled one by one, with pauses
    while the engine is busy. A large grammar waits while those of open requests fill `MOST_LARGE`."""

    def __init__(self, grammars: Grammars, clock: Callable[[], float] = time.monotonic) -> None:
        self._grammars = grammars
        self._clock = clock
        self._next_costly = 0.0  # when the next costly grammar may start
        self._cheap = ThreadPoolExecutor(CHEAP_THREADS, "grammars")
        self._costly = ThreadPoolExecutor(COSTLY_THREADS, "costly grammars")
        self._waiting: list[Submit] = []
        self._running: dict[str, Compilation] = {}  # by request id
        self._dropped: list[Compilation] = []  # still running though their request was dropped
        self._large: dict[str, tuple[StructuredOutputs, int]] = {}  # large grammars of open requests

    def __bool__(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, message: Submit) -> None:
        """Queue a request with structured outputs and their grammar."""
        self._waiting.append(message)

    def end(self, request_id: str) -> None:
        """Forget a request, whether it waits, compiles or has been taken. A compilation that runs is left to end."""
        self._waiting = [one for one in self._waiting if one.request_id != request_id]
        self._large.pop(request_id, None)
        if (running := self._running.pop(request_id, None)) is not None and not running[1].cancel():
            self._dropped.append(running)

    def take(self, busy: bool = False) -> list[Compilation]:
        """Remove and return the requests whose grammar is compiled or has failed; start others. `busy`: the engine has
        requests."""
        done = [one for one in self._running.values() if one[1].done()]
        for message, _ in done:
            del self._running[message.request_id]
        self._dropped = [one for one in self._dropped if not one[1].done()]
        for message in sorted(self._waiting, key=lambda one: one.turn):
            if (known := self._remembered(message)) is not None:
                done.append((message, known))
            elif self._may_start(message, busy):
                assert message.grammar is not None
                spec, grammar = _spec(message), message.grammar
                threads = self._costly if _is_costly(message) else self._cheap
                if _is_costly(message):
                    self._next_costly = self._clock() + COSTLY_PERIOD * grammar.seconds
                compiling = threads.submit(self._grammars.constraint, spec, grammar.text, grammar.bytes)
                self._running[message.request_id] = (message, compiling)
            else:
                continue
            self._waiting.remove(message)
            if message.grammar is not None and message.grammar.bytes > LARGE:
                self._large[message.request_id] = (_spec(message), message.grammar.bytes)
        return done

    def close(self) -> None:
        """Wait for the threads to end."""
        for threads in (self._cheap, self._costly):
            threads.shutdown(cancel_futures=True)

    def _remembered(self, message: Submit) -> "Future[Constraint] | None":
        known = self._grammars.find(_spec(message))
        if known is None:
            return None
        found: Future[Constraint] = Future()
        found.set_result(known)
        return found

    def _may_start(self, message: Submit, busy: bool) -> bool:
        """Return whether a thread is free for this grammar, there is memory for it, and a costly one is due."""
        costly = _is_costly(message)
        if costly and busy and self._clock() < self._next_costly:
            return False
        working = sum(_is_costly(other) == costly for other, _ in [*self._running.values(), *self._dropped])
        if working >= (COSTLY_THREADS if costly else CHEAP_THREADS):
            return False
        spec, size = _spec(message), message.grammar.bytes if message.grammar is not None else 0
        if any(_spec(other) == spec for other, _ in self._running.values()):
            return False  # it will be remembered in a moment
        held = dict(self._large.values())
        return size <= LARGE or not held or sum(held.values()) + size <= MOST_LARGE


def _is_costly(message: Submit) -> bool:
    return message.grammar is not None and message.grammar.seconds > CHEAP_SECONDS


def _spec(message: Submit) -> StructuredOutputs:
    spec = message.params.structured_outputs
    assert spec is not None
    return spec
