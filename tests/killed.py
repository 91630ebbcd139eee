"""A program that ends where a file would be renamed, as `kill -9` ends it: nothing is cleared away. In a process of its own,
or, which is quicker, in this one."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHILD = """
import os, runpy, signal, sys
from pathlib import Path
name, count, sys.argv = sys.argv[1], int(sys.argv[2]), sys.argv[2:]
right, seen = os.replace, []
def replace(old, new):
    seen.append(Path(new).name)
    if seen.count(name) == count:
        os.kill(os.getpid(), signal.SIGKILL)
    right(old, new)
os.replace = replace
from headrace.training import run
run.Run.checkpoint_seconds = 0.0
runpy.run_module("headrace", run_name="__main__")
"""


class Killed(BaseException):
    """Nothing of the program runs after it."""


def each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings write a checkpoint after every step."""
    from headrace.training import run

    monkeypatch.setattr(run.Run, "checkpoint_seconds", 0.0)


def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings that go on have forgotten the state of the optimiser."""
    from headrace.training import run

    right = run.Run._load
    monkeypatch.setattr(run.Run, "_load", lambda self: (right(self), self.adam.state.clear()))


def killed_at(name: str, count: int, call: Callable[[], Any]) -> None:
    """Make a call that ends where something is to get this name for the `count`-th time."""
    right, seen = os.replace, []

    def replace(old: Any, new: Any) -> None:
        seen.append(Path(new).name)
        if seen.count(name) == count:
            patch.setattr(Path, "unlink", lambda *_, **__: None)
            raise Killed
        right(old, new)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(Killed):
            call()


def command_killed_at(name: str, count: int, *arguments: object) -> None:
    """The same of a command in a process of its own, whose trainings write a checkpoint after every step."""
    line = [sys.executable, "-c", CHILD, name, str(count), *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
