"""Main program of a confined process: `python -m headrace.confined.child MODULE ARGUMENT`, its standard input a socket.

The process imports MODULE, gives up its access to files and network, and then answers questions one at a time. A frame is four
bytes of length (big-endian) and msgpack: a question is (function, CPU seconds, bytes of memory, argument), an answer is a
value. Functions report errors in their answers; an exception ends the process. The kernel ends the process (SIGPROF) when a
question has used its CPU time, even inside one C call.
"""

import contextlib
import importlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace import host

REFUSED_EVENTS = (
    "ctypes.",
    "fcntl.",
    "mmap.",
    "open",
    "os.",
    "pty.",
    "shutil.",
    "socket.",
    "sqlite3.",
    "subprocess.",
    "tempfile.",
)
CEILING = 2 << 30  # bytes of address space: no question may have more
LIFE = 600  # seconds of CPU time of the process; the pool replaces it earlier


def give_up_access() -> None:
    """Lower the system's limits for good: no new descriptor (so no file, no socket), no process, no larger file."""
    for name, most in {"NOFILE": 0, "NPROC": 0, "FSIZE": 0, "CORE": 0, "CPU": LIFE, "AS": CEILING}.items():
        host.limit(name, most)
    sys.addaudithook(refuse)


def refuse(event: str, arguments: Any) -> None:
    """Audit hook of the interpreter, in case the kernel does not refuse the same. Raises PermissionError."""
    if event.startswith(REFUSED_EVENTS):
        raise PermissionError(f"{event} is not allowed here")


@contextlib.contextmanager
def limited(seconds: float, memory: int) -> Iterator[None]:
    """Limit one question: `seconds` of CPU time, after which the kernel ends the process, and `memory` bytes of addresses."""
    host.limit("AS", min(memory, CEILING), CEILING)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(name: str, argument: str) -> None:
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    # SIGPROF ends the process, also if the parent ignores or blocks it.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    host.leave_the_network()
    module = importlib.import_module(name)
    module.warm(argument)
    give_up_access()
    answers.write(b".")
    answers.flush()
    while size := int.from_bytes(questions.read(4), "big"):
        frame = questions.read(size)
        _, seconds, memory, _ = msgspec.msgpack.decode(frame, type=tuple[str, float, int, msgspec.Raw])
        with limited(seconds, memory):
            function, _, _, question = msgspec.msgpack.decode(frame)
            answer = msgspec.msgpack.encode(getattr(module, function)(question))
        answers.write(len(answer).to_bytes(4, "big") + answer)
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
