"""Fixture that limits how long a test may block its event loops and how much memory it may take."""

import asyncio
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MOST_HELD = 0.1  # seconds
TRIES = 5  # what takes too long does so each time; CPU time, too, is longer where others work


class Held:
    """What this test's event loops did at most: the longest that one callback worked (CPU time of its thread, which no busy
    machine makes longer), and how many bytes this process took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.most = MOST_HELD
        gc.freeze()  # what other tests have left is not this one's to walk through
        peak()
        self._before = peak()
        run = asyncio.events.Handle._run

        def timed(handle: Any) -> None:
            began = time.thread_time()
            run(handle)
            self.seconds = max(self.seconds, time.thread_time() - began)

        monkeypatch.setattr(asyncio.events.Handle, "_run", timed)

    def check(self) -> None:
        gc.unfreeze()
        assert self.seconds < self.most
        assert peak() - self._before < 200 << 20


@pytest.fixture(autouse=True)
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Every request of this file leaves the loop to others, and takes little memory."""
    for name in {"server", "door"} & set(request.fixturenames):
        request.getfixturevalue(name)  # what starts it, in the first test of a process, is no request
    found = Held(monkeypatch)
    yield found
    found.check()


def peak() -> int:
    """The most bytes this process has held since the last call."""
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(found.split()[1]) << 10
