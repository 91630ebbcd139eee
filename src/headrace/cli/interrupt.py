"""Ctrl-C handling: a request to stop between two engine steps, so the engine stays consistent."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from headrace.cli.output import say

# Exit code of a command that Ctrl-C ended: 128 and the number of SIGINT.
INTERRUPTED = 130
# Seconds between two checks for Ctrl-C while a line is read.
CHECK_SECONDS = 0.2

T = TypeVar("T")


class Interrupt:
    """While active, Ctrl-C sets `requested`. With `second`, another Ctrl-C raises KeyboardInterrupt at once.

    Where Ctrl-C is ignored (a job in the background), or outside the main thread, nothing changes.
    """

    def __init__(self, *, second: bool = True) -> None:
        self.requested = False
        self._second = second
        self._waiting = False
        self._before: Any = None
        self._alarm: Any = None

    def __call__(self) -> bool:
        return self.requested

    def __enter__(self) -> "Interrupt":
        ignored = signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None)
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._alarm = signal.signal(signal.SIGALRM, lambda number, frame: None)
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._alarm)

    def wait(self, read: Callable[[], T]) -> T:
        """Return the result of `read`, which waits for the user. Ctrl-C raises KeyboardInterrupt at once, also one that was
        noted before.

        A signal that comes just before the program waits for a key does not end the wait; a timer does.
        """
        if self._before is None:
            return read()
        try:
            self._waiting = True
            if self.requested:
                self.requested = False
                raise KeyboardInterrupt
            signal.setitimer(signal.ITIMER_REAL, CHECK_SECONDS, CHECK_SECONDS)
            return read()
        finally:
            self._waiting = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._waiting or (self.requested and self._second):
            self._waiting = False
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """Tell the user, after Ctrl-C, that the same command resumes the training in the folder `out`."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"{out}: stopped; the same command continues")
        raise
