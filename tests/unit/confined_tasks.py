"""Tasks for confined processes in tests: what a broken library, or whoever has taken one over, might do."""

import os
import socket
import subprocess
import threading
import time
from typing import Any

KEPT: list[Any] = []


def warm(argument: str) -> None:
    """An argument of digits is a number of bytes to hold from the start, as a large vocabulary is held; "thread" starts a
    thread, as a library does."""
    KEPT.append(argument)
    if argument == "thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if argument.isdigit():
        KEPT.append(b"x" * int(argument))


def echo(question: Any) -> Any:
    return question


def warmed(_: Any) -> Any:
    return KEPT[0]


def pid(_: Any) -> int:
    return os.getpid()


def environ(_: Any) -> dict[str, str]:
    return dict(os.environ)


def spin(_: Any) -> None:
    while True:
        pass


def hang(_: Any) -> int:
    """One call into C, without an end."""
    return (10 ** (10**10)).bit_length()


def work(seconds: float) -> int:
    """CPU time; returns the priority at its end."""
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass
    return os.getpriority(os.PRIO_PROCESS, 0)


def fill(size: int) -> int:
    return len(bytearray(size))


def keep(size: int) -> int:
    KEPT.append(b"x" * size)
    return os.getpid()


def fail(_: Any) -> None:
    raise RuntimeError("a mistake")


def reach(question: tuple[str, str]) -> str:
    """What comes of reaching for something."""
    what, where = question
    try:
        match what:
            case "read":
                with open(where, "rb") as file:
                    file.read(1)
            case "write":
                with open(where, "wb") as file:
                    file.write(b"x")
            case "remove":
                os.remove(where)
            case "connect":
                socket.create_connection(("127.0.0.1", int(where)), timeout=5).close()
            case "run":
                subprocess.run([where], check=False)
            case "descriptor":  # of which the interpreter is not told: the kernel alone refuses it
                for one in os.pipe():
                    os.close(one)
    except (OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"
