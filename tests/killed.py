"""A program that ends where a file would be renamed, as `kill -9` ends it: nothing is cleared away. In a process of its own,
or, which is quicker, in this one."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.cli_shell import FORK_EACH_TASK, environment

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


# Forks of one process that has imported torch, so that a command starts in milliseconds. Each line of its stdin is a task:
# arguments, a rename to end after (or before), files for stderr and for the renames.
FORKS = f"""
import gc, json, os, signal, sys
from pathlib import Path
import torch, torch._dynamo  # the latter by the first optimiser
import headrace.cli.app, headrace.cli.opening, headrace.compress.write, headrace.training.classifier, headrace.training.distil
from headrace.training import run
run.Run.checkpoint_seconds = 0.0
gc.freeze()  # no child collects, and so copies, what is imported
{FORK_EACH_TASK}root, renames = Path(task["root"]), open(task["renames"], "a")
for descriptor, file in enumerate([os.devnull, task["output"], task["output"]]):
    os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
def watch(right):
    def rename(old, new):
        name = Path(new).relative_to(root).as_posix()
        if task["before"] == name:
            os.kill(os.getpid(), signal.SIGKILL)
        right(old, new)
        print(name, file=renames, flush=True)
        if task["after"] == name:
            os.kill(os.getpid(), signal.SIGKILL)
    return rename
os.replace, os.rename = watch(os.replace), watch(os.rename)
sys.argv[1:] = task["arguments"]
code = headrace.cli.app.main()
sys.stdout.flush()
os._exit(code)  # an interpreter with torch takes a while to end
"""


class Commands:
    """Commands in processes of their own that end by SIGKILL at a rename. Trainings write a checkpoint after every step.

    root: folder of all files that the commands rename.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._output, self._renames = root / ".output", root / ".renames"

    def __call__(self, *arguments: object, before: str | None = None, after: str | None = None) -> list[str]:
        """Run a command and return the files that it renamed, relative to `root`, in order.

        before, after: the file at whose first rename the command is killed. Asserts that it was, or that it succeeded.
        """
        for path in (self._output, self._renames):
            path.write_text("")
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        files = {"root": str(self.root), "output": str(self._output), "renames": str(self._renames)}
        task = {"arguments": [*map(str, arguments)], "before": before, "after": after, **files}
        server.stdin.write(json.dumps(task) + "\n")
        server.stdin.flush()
        code, killed = int(server.stdout.readline()), before is not None or after is not None
        assert code == (-signal.SIGKILL if killed else 0), (before, after, self._output.read_text())
        return self._renames.read_text().split("\n")[:-1]


@cache
def _server() -> "subprocess.Popen[str]":
    """The process that forks. It ends with this process, which closes its stdin."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", FORKS], env=environment(), text=True, **pipes)  # type: ignore[call-overload,no-any-return]
