"""Compiles grammars next to the engine's loop, for requests that wait for theirs."""

from concurrent.futures import Future, ThreadPoolExecutor

from headrace.data.structured import StructuredOutputs
from headrace.decoding.constrained import Constraint, Grammars
from headrace.server.engines.messages import Submit

THREADS = 2  # one costly grammar does not hold up the others
LARGE = 1 << 20  # bytes of a compiled grammar that counts as large
MOST_LARGE = 256 << 20  # bytes of all large grammars of open requests

Done = tuple[Submit, "Future[Constraint]"]


class Compiling:
    """The queue of one engine. The request with the smallest `turn` starts first; a large grammar waits while those of open
    requests fill `MOST_LARGE`. Only grammars with a known cost come here, so each takes about a second at most."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._threads = ThreadPoolExecutor(THREADS, "grammars")
        self._waiting: list[Submit] = []
        self._running: dict[str, Done] = {}  # by request id
        self._left: list[Future[Constraint]] = []  # that run though their request was dropped
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
            self._left.append(running[1])

    def take(self) -> list[Done]:
        """Remove and return the requests whose grammar is compiled or has failed; start others."""
        found = [one for one in self._running.values() if one[1].done()]
        for message, _ in found:
            del self._running[message.request_id]
        self._left = [one for one in self._left if not one.done()]
        for message in sorted(self._waiting, key=lambda one: one.turn):
            if (known := self._remembered(message)) is not None:
                found.append((message, known))
            elif len(self._running) + len(self._left) < THREADS and self._fits(message):
                assert message.grammar is not None
                spec, grammar = _spec(message), message.grammar
                compiling = self._threads.submit(self._grammars.constraint, spec, grammar.text, grammar.bytes)
                self._running[message.request_id] = (message, compiling)
            else:
                continue
            self._waiting.remove(message)
            if message.grammar is not None and message.grammar.bytes > LARGE:
                self._large[message.request_id] = (_spec(message), message.grammar.bytes)
        return found

    def close(self) -> None:
        """Wait for the threads to end."""
        self._threads.shutdown(cancel_futures=True)

    def _remembered(self, message: Submit) -> "Future[Constraint] | None":
        known = self._grammars.find(_spec(message))
        if known is None:
            return None
        found: Future[Constraint] = Future()
        found.set_result(known)
        return found

    def _fits(self, message: Submit) -> bool:
        spec, size = _spec(message), message.grammar.bytes if message.grammar is not None else 0
        if any(_spec(other) == spec for other, _ in self._running.values()):
            return False  # it will be remembered in a moment
        held = dict(self._large.values())
        return size <= LARGE or not held or sum(held.values()) + size <= MOST_LARGE


def _spec(message: Submit) -> StructuredOutputs:
    spec = message.params.structured_outputs
    assert spec is not None
    return spec
