"""What a confined process runs: `python -m headrace.confined.child MODULE ARGUMENT`, its standard input a socket.

It loads all it will need, shuts itself in, and then answers questions one at a time. A frame is four bytes of length and
msgpack: (function, seconds, memory, question) comes in, the answer goes out. The functions are the module's, and say in
their answers what was wrong; whatever else goes wrong ends the process. The kernel ends it (SIGPROF) once a question has used
its seconds of CPU time, be it inside one C call.
"""

import contextlib
import importlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace import host

SHUT = ("ctypes.", "fcntl.", "mmap.", "open", "os.", "pty.", "shutil.", "socket.", "sqlite3.", "subprocess.", "tempfile.")
CEILING = 2 << 30  # bytes of address space that no question may raise its own limit above
LIFE = 600  # seconds of CPU time; long before, a process is replaced


def shut() -> None:
    """No descriptor can be opened any more, so no file and no socket; no process can be started, nothing changed."""
    for name, most in {"NOFILE": 0, "NPROC": 0, "FSIZE": 0, "CORE": 0, "CPU": LIFE, "AS": CEILING}.items():
        host.limit(name, most)
    sys.addaudithook(refuse)


def refuse(event: str, arguments: Any) -> None:
    """An audit hook: the interpreter refuses the same, whatever the kernel does."""
    if event.startswith(SHUT):
        raise PermissionError(f"{event} is not allowed here")


@contextlib.contextmanager
def limited(seconds: float, memory: int) -> Iterator[None]:
    """Ends the process once it has used `seconds` of CPU time; lets it have no more than `memory` bytes of addresses."""
    host.limit("AS", min(memory, CEILING), CEILING)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main(name: str, argument: str) -> None:
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process, even if the parent ignored or blocked it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    host.leave_the_network()
    module = importlib.import_module(name)
    module.warm(argument)
    shut()
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
