"""What a process does to the world around it, told by an audit hook: connections, names looked up, files opened for writing or
changed, processes started. The server's own are known; whatever else happens while hostile requests run is a finding."""

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

OUTWARD = {f"socket.{name}" for name in "bind connect getaddrinfo gethostbyname gethostbyaddr sendto sendmsg".split()}
STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"}
CHANGES = {f"os.{name}" for name in "chmod chown link mkdir remove rename rmdir symlink truncate utime".split()}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
OWN_PROCESSES = ("headrace.confined.child", "headrace.server.engines.engine_process")
OWN_THREADS = ("server", "asyncio_", "store-", "confined")  # of a server in a test's process
OWN_STATE = ("server.lock", "server.sqlite", "headrace-")  # of a server without --state: it goes with the server
HARMLESS = re.compile(r"/dev/null|/proc/self/|/proc/\d+/autogroup$")  # the last: the priority of a confined process
SITE = """import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.audit import watch
watch(Path({log!r}))
"""


def finding(event: str, arguments: tuple[Any, ...]) -> str:
    """What an event of the interpreter is, one line; empty for what a server does."""
    if event == "open":
        path, _, flags = arguments
        name = os.fsdecode(path) if isinstance(path, str | bytes) else ""
        if not name or not flags & WRITES or "__pycache__" in name or HARMLESS.match(name):
            return ""
    elif event == "subprocess.Popen":
        if any(own in map(str, arguments[1]) for own in OWN_PROCESSES):
            return ""
    elif event in CHANGES:
        if any("__pycache__" in str(one) or Path(str(one)).name.startswith(OWN_STATE) for one in arguments):
            return ""
    elif event not in OUTWARD | STARTS | {"pickle.find_class"}:
        return ""
    return f"{os.getpid()} {event} {arguments!r}"[:300].replace("\n", " ")


def watch(log: Path, threads: tuple[str, ...] = ()) -> None:
    """Write every finding of this process from now on to `log`; with `threads` those of threads so called alone."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if threads and not threading.current_thread().name.startswith(threads):
            return
        if said := finding(event, arguments):
            with suppress(OSError):  # a confined process may write no file, and its own hook refuses what is asked for
                os.write(sink, said.encode("utf-8", "replace") + b"\n")

    sys.addaudithook(hook)


def install(folder: Path) -> Path:
    """Watch the servers of this process and all that they start; returns the log."""
    log = folder / "findings"
    hidden = getattr(sys.modules.get("sitecustomize"), "__file__", None)  # by the one that is written here
    site = Path(hidden).read_text() if hidden else ""
    (folder / "sitecustomize.py").write_text(site + SITE.format(root=str(Path(__file__).parents[1]), log=str(log)))
    sys.path.insert(0, str(folder))  # which the server hands on to its processes
    watch(log, OWN_THREADS)
    return log


@contextmanager
def assert_nothing_logged(log: Path) -> Iterator[None]:
    """Raises AssertionError where something was found meanwhile."""
    before = log.stat().st_size
    yield
    with log.open("rb") as file:
        file.seek(before)
        found = file.read().decode("utf-8", "replace").splitlines()
    assert found == [], found
