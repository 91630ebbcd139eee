"""One confined process, as seen from outside: started, asked, and ended when it uses more than it may."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace import host

CHILD = "headrace.confined.child"
KEPT_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "TZ")
# Seconds of the clock for a question, and for each second of its CPU limit: at idle priority next to a busy engine it gets a
# thirtieth of a processor, and a busy machine is no fault of the question.
PATIENCE, PATIENCE_PER_SECOND = 180.0, 100.0
LOOK = 0.1  # seconds between two looks at a process that works
EASY = 0.25  # seconds of CPU time after which a question is worked at with what time nobody else wants
NICENESS = 19  # of work that waits for processors nobody else wants
LINUX = sys.platform == "linux"
LIFE = 300.0  # seconds of CPU time after which a process is replaced
KEPT = 256 << 20  # bytes of memory it may hold besides what it had when it was ready; a vocabulary may be large


@dataclass(frozen=True, slots=True)
class Task:
    """Work that can be asked for: a function of a module, which is loaded in the confined process alone.

    The module also has `warm(argument)`, which loads all that its functions need: afterwards they can open no file. A
    question is a plain value; so is the answer, which says what was wrong with the question.
    """

    module: str
    function: str
    argument: str = ""
    seconds: float = 2.0  # CPU time of a question
    memory: int = 512 << 20  # bytes of address space
    answer: int = 1 << 20  # bytes
    remembered: bool = False  # the answer to the same question is the same


class OverrunError(Exception):
    """The process that had the question was ended. `code`: how; `in_time`: for something else than its time."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a confined process ended with code {code}")
        self.code = code
        self.in_time = code not in (-signal.SIGPROF, -signal.SIGKILL)


class ConfinedProcess:
    """A process for the functions of one module. Raises OverrunError when it ends under a question, and is then of no use."""

    def __init__(self, task: Task, idle: bool = False) -> None:
        self.kind = (task.module, task.argument, idle)
        self.worn = False  # to be replaced
        self._idle = idle  # runs at idle priority from its start
        self._began, self._used = time.monotonic(), 0.0
        self._ready_memory = 0
        self.ready = False  # has loaded what it needs and has shut itself in
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-B", "-m", CHILD, task.module, task.argument]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env=environment(),
                start_new_session=True,  # Ctrl-C is for the program, not for this process
            )
        self._lowered = False
        if idle:
            self._lower_priority()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self) -> None:
        """Wait until it has loaded its module and has shut itself in."""
        if not self.ready:
            self.ready = bool(self._exactly(1, time.monotonic() + PATIENCE))
            self._ready_memory = host.held_memory(self.pid)

    def ask(self, task: Task, frame: bytes) -> Any:
        """The answer to a question of its module; `start` comes first."""
        began, last = self.used, time.monotonic() + PATIENCE + PATIENCE_PER_SECOND * task.seconds
        if self._idle:
            self._lower_priority()
        try:
            self._socket.settimeout(PATIENCE)
            self._socket.sendall(len(frame).to_bytes(4, "big") + frame)
        except OSError:
            raise OverrunError(self.end()) from None
        size = int.from_bytes(self._exactly(4, last, began), "big")
        if size > task.answer:
            self.end()
            raise OverrunError(-signal.SIGKILL)
        answer = msgspec.msgpack.decode(self._exactly(size, last, began))
        self.worn = self.worn or self.used > LIFE or host.held_memory(self.pid) > self._ready_memory + KEPT
        return answer

    def kill(self) -> None:
        """Whoever waits for its answer is told."""
        self._process.kill()

    def end(self) -> int:
        """Leave nothing of it; returns its exit code."""
        _ = self.used  # for the last time
        self._process.kill()
        self._socket.close()
        return self._process.wait()

    def _exactly(self, count: int, last: float, began: float | None = None) -> bytes:
        """So many bytes, until the clock says `last`. `began`: its CPU time when it got the question."""
        data = bytearray()
        self._socket.settimeout(LOOK)
        while len(data) < count:
            try:
                part = self._socket.recv(count - len(data))
            except TimeoutError:
                if time.monotonic() > last:
                    raise OverrunError(self.end()) from None
                if self._idle or (began is not None and self.used - began > EASY):
                    self._step_back()
            except ConnectionError:
                raise OverrunError(self.end()) from None
            else:
                if not part:
                    raise OverrunError(self.end())
                data += part
        return bytes(data)

    @property
    def used(self) -> float:
        """Seconds of CPU time, in the end those it had when it ended; of the clock, where the system does not say."""
        if self._process.returncode is None:
            try:
                self._used = host.process_clock(self.pid)
            except OSError:
                self._used = time.monotonic() - self._began
        return self._used

    def _step_back(self) -> None:
        """Run at idle priority from now on. The system does not let a process raise it again, so a process that began at normal
        priority is replaced after this question."""
        self.worn = self.worn or not self._idle
        self._lower_priority()

    def _lower_priority(self) -> None:
        """Set the niceness of all threads, and of the process's scheduling group, to 19.

        Linux schedules each session as a group (autogroup, sched(7)), and a thread's niceness counts within its group alone.
        The system limits how often groups may change: until the group has changed, later calls try again.
        """
        if self._lowered:
            return
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self.pid}/task") if LINUX else [self.pid]:
                os.setpriority(os.PRIO_PROCESS, int(thread), NICENESS)
        try:
            Path(f"/proc/{self.pid}/autogroup").write_text(str(NICENESS))
        except BlockingIOError:
            return
        except OSError:  # the system has no such groups
            pass
        self._lowered = True


def environment() -> dict[str, str]:
    """What a confined process inherits: where its libraries are, and no secrets."""
    kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TOKENIZERS_PARALLELISM": "false"}
