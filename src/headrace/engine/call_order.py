"""Threads that share an engine take turns."""

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A lock that is handed on in the order in which threads asked for it, so that none that asks again overtakes one that
    waits. A thread that has it must not ask for it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()  # until who has the lock lets this one go
        except BaseException:  # Ctrl-C
            with self._guard:
                handed = turn not in self._waiting
                if not handed:
                    self._waiting.remove(turn)
            if handed:
                self._hand_on()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hand_on()

    def _hand_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
