"""Compiles grammars in threads next to the engine's loop; their requests enter the engine afterwards."""

import contextlib
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from headrace.data.structured import StructuredOutputs
from headrace.decoding.constrained import Constraint, Grammars
from headrace.server.engines.messages import Submit

CHEAP_SECONDS = 0.05  # CPU time of a grammar that is compiled at the priority of the engine
CHEAP_THREADS, COSTLY_THREADS = 2, 1
NICENESS = 19  # of the thread for costly grammars: at normal priority it would stop a compute thread, and so all of them
LARGE = 1 << 20  # bytes of a compiled grammar that counts as large
MOST_LARGE = 256 << 20  # bytes of all large grammars of open requests

Compilation = tuple[Submit, "Future[Constraint]"]


class GrammarQueue:
    """The queue of one engine. The request with the smallest `turn` starts first; a large grammar waits while those of open
    requests fill `MOST_LARGE`. Only grammars with a known cost come here, so each takes about a second of CPU time at most;
    those above `CHEAP_SECONDS` are compiled one after the other, in processor time that the engine does not use."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._cheap = ThreadPoolExecutor(CHEAP_THREADS, "grammars")
        self._costly = ThreadPoolExecutor(COSTLY_THREADS, "costly grammars", _lower_priority)
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

    def take(self) -> list[Compilation]:
        """Remove and return the requests whose grammar is compiled or has failed; start others."""
        done = [one for one in self._running.values() if one[1].done()]
        for message, _ in done:
            del self._running[message.request_id]
        self._dropped = [one for one in self._dropped if not one[1].done()]
        for message in sorted(self._waiting, key=lambda one: one.turn):
            if (known := self._remembered(message)) is not None:
                done.append((message, known))
            elif self._fits(message):
                assert message.grammar is not None
                spec, grammar = _spec(message), message.grammar
                threads = self._costly if _is_costly(message) else self._cheap
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

    def _fits(self, message: Submit) -> bool:
        """Whether a thread is free for this grammar and there is memory for it."""
        costly = _is_costly(message)
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


def _lower_priority() -> None:
    """Lower the priority of this thread; on Linux each thread has its own."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _spec(message: Submit) -> StructuredOutputs:
    spec = message.params.structured_outputs
    assert spec is not None
    return spec
