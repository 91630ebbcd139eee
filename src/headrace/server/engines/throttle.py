"""Holding a loading process back while other models answer.

A step of the engine waits for its slowest thread, so a loader that takes a core for half of the time halves the speed of all
streams. The loader runs in short slices instead, and is stopped in between (SIGSTOP), as long as the threads of all processes
exceed the cores. Lower priorities would not do: the system does not let a process raise its priority again.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Any

from headrace import host
from headrace.server.engines.async_llm import AsyncLLM

SLICE, PAUSE = 0.006, 0.044  # seconds in which the loader runs and rests
LOOK = 0.05  # seconds between two looks if nothing is held back
# Share of --load-timeout after which the loader is not held back any more.
MOST = 0.25


class Throttle:
    """Holds back the process that loads `llm` while one of `others` has requests. `release` must be called in the end."""

    def __init__(self, llm: AsyncLLM, others: Sequence[AsyncLLM]) -> None:
        self._llm, self._others = llm, others
        self._left = MOST * llm.requests.replica.load_timeout
        self._stopped: int | None = None

    async def turn(self, ready: "asyncio.Future[Any]") -> None:
        """Let the loader run for a moment, and then hold it back for a moment if others answer. Ends early with `ready`."""
        holds = self._left > 0 and self._contended()
        await asyncio.wait({ready}, timeout=SLICE if holds else LOOK)
        if holds and not ready.done() and self._signal(signal.SIGSTOP):
            self._left -= PAUSE
            await asyncio.wait({ready}, timeout=PAUSE)
            self.release()

    def release(self) -> None:
        """Let the loader run."""
        if self._stopped is not None:
            self._signal(signal.SIGCONT)

    def _contended(self) -> bool:
        busy = sum(_threads(one) for one in self._others if one.inflight)
        return bool(busy) and busy + _threads(self._llm) > host.cores()

    def _signal(self, number: signal.Signals) -> bool:
        pid = self._llm.pid if number is signal.SIGSTOP else self._stopped
        self._stopped = pid if number is signal.SIGSTOP else None
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return True


def _threads(llm: AsyncLLM) -> int:
    return int(llm.settings.get("threads") or host.cores())
