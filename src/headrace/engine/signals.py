"""Ctrl-C and engine steps: a step is carried through, and the signal acts after it."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Uninterrupted:
    """While open, Ctrl-C waits; what it would have done happens on leaving. Changes nothing outside the main thread."""

    def __init__(self) -> None:
        self._noted = False
        self._before: Any = None

    def __enter__(self) -> "Uninterrupted":
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is None:
            return
        signal.signal(signal.SIGINT, self._before)
        if self._noted:
            self._before(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
