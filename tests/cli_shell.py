"""The command line as a person uses it: in this process, in one of its own, or on a terminal."""

import codecs
import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from types import TracebackType

import pytest

from headrace.cli.app import main
from headrace.cli.output import status

ROOT = Path(__file__).parents[1]
ERASE = "\x1b[2K"  # what the line that says how far it is begins with
SECONDS = 600  # after which a child that should have answered has not


class Shell:
    """Runs `headrace` with its home, its catalogs and its stdin under the test's control."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._monkeypatch, self._capsys = monkeypatch, capsys
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HEADRACE_DEBUG"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"HEADRACE_HOME": "home", "XDG_CONFIG_HOME": "config"}.items():
            monkeypatch.setenv(name, str(folder / value))
        monkeypatch.setenv("HEADRACE_LOG", "error")  # a warning about this installation is no part of a test

    def __call__(self, *arguments: object, stdin: str = "") -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command run here. A first argument that is a function is another command's main."""
        self._monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        self._capsys.readouterr()
        run, words = (arguments[0], arguments[1:]) if callable(arguments[0]) else (main, arguments)
        code = run([str(word) for word in words])
        out, err = self._capsys.readouterr()
        return code, out, err

    def watched(self, *arguments: object) -> tuple[int, str, str]:
        """The same of a command whose stderr is a terminal, where the line that says how far it is moves."""
        outer, inner = pty.openpty()
        seen: list[str] = []
        reader = threading.Thread(target=_read_all, args=(outer, seen))
        reader.start()
        with os.fdopen(inner, "w", encoding="utf-8") as terminal, self._monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            code, out, _ = self(*arguments)
        status.cache_clear()  # it is of that terminal
        reader.join()
        os.close(outer)
        return code, out, "".join(seen)

    def start(self, *arguments: object, before: str = "", **more: object) -> "subprocess.Popen[str]":
        """The command as a process. `before`: Python that is run in it first."""
        script = f"import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n{before}\n{MAIN}"
        command = [sys.executable, "-c", script, *map(str, arguments)]
        settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **more}
        return subprocess.Popen(command, env=environment(), **settings)  # type: ignore[call-overload,no-any-return]

    def forked(self, *arguments: object, before: str = "") -> "subprocess.CompletedProcess[str]":
        """Run the command in a fork of a process that has the modules of the command line but not torch."""
        command = list(map(str, arguments))
        out, err = (self.folder / f".{name}" for name in ("stdout", "stderr"))
        task = {"arguments": command, "before": before, "environment": environment(), "files": [str(out), str(err)]}
        parent = _fork_server()
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(json.dumps(task) + "\n")
        parent.stdin.flush()
        code = int(parent.stdout.readline())
        said = [path.read_text() for path in (out, err)]
        out.unlink()
        err.unlink()
        return subprocess.CompletedProcess(command, code, *said)


@cache
def _fork_server() -> "subprocess.Popen[str]":
    """It ends with this process, which closes its stdin."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", FORKS], env=environment(), text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def _read_all(terminal: int, seen: list[str]) -> None:
    """What is written until nobody has the other end any more."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 65536):
            seen.append(decoder.decode(data))


def screen(seen: str) -> list[str]:
    """The lines that stand on a terminal in the end."""
    return [line.rpartition(ERASE)[2].rstrip() for line in seen.replace("\r\n", "\n").split("\n")]


def check_bar(seen: str, *said: str) -> None:
    """That a line moved on a terminal, from the first moment on; that it said each of these; and that nothing of it is left."""
    drawn = [part.split("\n")[0].rstrip("\r") for part in seen.split(ERASE)[1:]]
    assert drawn[0].endswith(" starting")
    for words in said:
        assert any(words in one for one in drawn), (words, drawn)
    assert not any(sign in line for line in screen(seen) for sign in ("starting", "━", "─ ")), seen


MAIN = "from headrace.cli.app import main\nsys.exit(main())"
# Each line of stdin is a task (JSON). A child goes on with `task`; the parent prints its exit code.
FORK_EACH_TASK = """for line in open(os.dup(0)):
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
task = json.loads(line)
"""
FORKS = f"""
import json, os, signal, sys
import typer
import headrace.cli.opening, headrace.startup.backend
assert "torch" not in sys.modules
signal.signal(signal.SIGINT, signal.default_int_handler)
{FORK_EACH_TASK}os.environ.clear()
os.environ.update(task["environment"])
for descriptor, file in enumerate([os.devnull, *task["files"]]):
    os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), descriptor)
sys.argv[1:] = task["arguments"]
exec(task["before"])
{MAIN}
"""


def environment() -> dict[str, str]:
    """For a child: this source tree, one thread, UTF-8."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8", "TERM": "xterm"}


class Terminal:
    """A command on a terminal of its own. `before`: Python that is run in it first."""

    def __init__(self, *arguments: object, columns: int = 60, before: str = "") -> None:
        self.seen, self._read = "", 0  # since the last `send`; how much of it the last `wait_for` was content with
        self._fd, inner = pty.openpty()
        script = f"import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{before}\n{MAIN}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**environment(), "COLUMNS": str(columns), "LINES": "30"},
        )
        os.close(inner)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    def wait_for(self, text: str, count: int = 1) -> str:
        """Read until `text` has been seen `count` times after what the last `wait_for` or `send` ended on."""
        end = time.monotonic() + SECONDS
        for _ in range(count):
            while (at := self.seen.find(text, self._read)) < 0:
                ready, _, _ = select.select([self._fd], [], [], max(end - time.monotonic(), 0))
                assert ready, f"no {text!r} in {self.seen[self._read :]!r}"
                self.seen += os.read(self._fd, 65536).decode(errors="replace")
            self._read = at + len(text)
        return self.seen

    def send(self, keys: str) -> None:
        self.seen, self._read = "", 0
        os.write(self._fd, keys.encode())

    def exit_code(self) -> int:
        """Of the command, which is about to end; the last it wrote is read."""
        code = self._process.wait(SECONDS)
        with contextlib.suppress(OSError):  # the terminal is gone with the last process on it
            while select.select([self._fd], [], [], 0)[0]:
                self.seen += os.read(self._fd, 65536).decode(errors="replace")
        return code
