"""Signals and engine steps: Python's signal handlers run after a step, never inside it."""

# `_signal` has the functions of `signal` without conversions to enums, which would take 50 µs of each step.
import _signal  # type: ignore[import-not-found]
import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# Signals for which programs install handlers. The interpreter cannot catch SIGKILL and SIGSTOP, and faults such as SIGSEGV
# must not wait.
NAMES = (
    *("SIGINT", "SIGALRM", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF", "SIGXCPU"),
    *("SIGCHLD", "SIGCONT", "SIGIO", "SIGURG", "SIGWINCH", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGBREAK"),
)
DEFERRED = tuple(int(getattr(signal, name)) for name in NAMES if hasattr(signal, name))

Handler = Callable[[int, FrameType | None], Any]


class Uninterrupted:
    """While open, Python's signal handlers wait. They run when it closes, and their exceptions reach the caller.

    An exception raised by a handler inside a step would look like an error of the step: it would fail the requests and not
    reach the caller. Handlers run in the main thread, so in any other thread this does nothing.
    """

    def __init__(self) -> None:
        self._pending: dict[int, FrameType | None] = {}  # by signal number, in order of arrival
        self._before: dict[int, Handler] = {}

    def __enter__(self) -> "Uninterrupted":
        if threading.current_thread() is threading.main_thread():
            for number in DEFERRED:
                handler = _signal.getsignal(number)
                # Entries nest (a step inside an abort): the outer one delivers.
                if callable(handler) and getattr(handler, "__func__", None) is not Uninterrupted._note:
                    self._before[number] = handler
                    _signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            _signal.signal(number, handler)
        # ExitStack: every handler runs, also if an earlier one raises.
        with contextlib.ExitStack() as stack:
            for number, frame in reversed(self._pending.items()):
                stack.callback(self._before[number], number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending.setdefault(number, frame)
