"""Ctrl-C while the engine runs: noted, and acted on between two steps, so that the engine stays whole."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While active, the first Ctrl-C sets `requested`; a second one raises KeyboardInterrupt wherever the program is.

    Where Ctrl-C is ignored (a job in the background), or outside the main thread, nothing changes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __call__(self) -> bool:
        return self.requested

    def __enter__(self) -> "Interrupt":
        ignored = signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None)
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
