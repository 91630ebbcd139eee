"""One confined process, seen from its parent: start, question, answer, end, and the priority at which it runs."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace import host

CHILD = "headrace.confined.child"
KEPT_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "TZ")
# Seconds of the clock for a question, and for each second of its CPU limit: at idle priority next to a busy engine it gets a
# thirtieth of a processor, and a busy machine is no fault of the question.
PATIENCE, PATIENCE_PER_SECOND = 180.0, 100.0
LOOK = 0.1  # seconds between two looks at the CPU time of a process with a question
EASY = 0.25  # seconds of CPU time after which a question goes on at idle priority
LIFE = 300.0  # seconds of CPU time after which a process is replaced
# Bytes of memory that a process may keep beyond those it had when it was ready; a vocabulary may be large.
KEPT = 256 << 20


@dataclass(frozen=True, slots=True)
class Task:
    """A function that a confined process can run, and its limits. Only the confined process imports the module.

    The module also has `warm(argument)`, which loads everything that its functions need: they cannot open files afterwards.
    Questions and answers are plain values (msgpack); an answer reports what was wrong with its question.
    """

    module: str
    function: str
    argument: str = ""
    seconds: float = 2.0  # CPU time
    memory: int = 512 << 20  # bytes of address space
    answer: int = 1 << 20  # bytes of the answer
    remembered: bool = False  # the pool remembers answers to equal questions


class OverrunError(Exception):
    """The process ended under its question. `code`: its exit code; `in_time`: it ended for another reason than its CPU time."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a confined process ended with code {code}")
        self.code = code
        self.in_time = code not in (-signal.SIGPROF, -signal.SIGKILL)


class ConfinedProcess:
    """A process that runs the functions of one module, one question at a time. Methods raise OverrunError if it ends; it cannot
    be used afterwards. Owned by a pool."""

    def __init__(self, task: Task, idle: bool = False) -> None:
        self.kind = (task.module, task.argument, idle)
        self.worn = False  # the pool must replace it
        self._idle = idle  # it has idle priority from its start
        self._began, self._used = time.monotonic(), 0.0
        self._ready_memory = 0
        self.ready = False  # it has loaded its module and given up its access
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-B", "-m", CHILD, task.module, task.argument]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env=environment(),
                start_new_session=True,  # a Ctrl-C does not reach it
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
        """Wait until it has loaded its module and given up its access."""
        if not self.ready:
            self.ready = bool(self._exactly(1, time.monotonic() + PATIENCE))
            self._ready_memory = host.held_memory(self.pid)

    def ask(self, task: Task, frame: bytes) -> Any:
        """Send a question (an encoded frame) and return its answer; call `start` before."""
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
        """End the process at once; a thread in `ask` gets an OverrunError."""
        self._process.kill()

    def end(self) -> int:
        """End the process and free its resources; returns its exit code."""
        _ = self.used  # read the clock while the process exists
        self._process.kill()
        self._socket.close()
        return self._process.wait()

    def _exactly(self, count: int, last: float, began: float | None = None) -> bytes:
        """Read `count` bytes; the process ends at the time `last` (monotonic). `began`: its CPU time when it got the
        question."""
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
        """CPU time of the process in seconds, also after its end; elapsed time if the system has no such clock."""
        if self._process.returncode is None:
            try:
                self._used = host.process_clock(self.pid)
            except OSError:
                self._used = time.monotonic() - self._began
        return self._used

    def _step_back(self) -> None:
        """Go on at idle priority. A process cannot raise its priority again, so one that began at normal priority is replaced
        after this question."""
        self.worn = self.worn or not self._idle
        self._lower_priority()

    def _lower_priority(self) -> None:
        """Run the process at idle priority. Later calls try again until the system has accepted all of it."""
        self._lowered = self._lowered or host.lower_priority(self.pid)


def environment() -> dict[str, str]:
    """Environment variables of a confined process: paths of its libraries, no secrets."""
    kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
    # Threads of a numerical library would take address space, and cannot be started.
    kept |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TOKENIZERS_PARALLELISM": "false"}
