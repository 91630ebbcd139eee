"""While hostile requests run, no process of the server connects, looks up a name, writes a file or starts a program: an audit
hook under the tests of this folder that send them (`conftest.watched`). Here: that it would tell."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.confined.process import environment
from tests.audit import assert_nothing_logged
from tests.server.harness import ROOT, Running

DEEDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "connect": ("socket.connect", lambda folder: socket.socket().connect_ex(("127.0.0.1", 9))),
    "name": ("socket.getaddrinfo", lambda folder: socket.getaddrinfo("127.0.0.1", 9)),
    "write": ("open", lambda folder: (folder / "x").write_text("x")),
    "change": ("os.mkdir", lambda folder: (folder / "y").mkdir()),
    "start": ("subprocess.Popen", lambda folder: subprocess.run(["true"], check=True)),
}


@pytest.mark.parametrize("name", DEEDS)
def test_the_audit_hook_reports_calls_of_server_threads(audit_log: Path, tmp_path: Path, name: str) -> None:
    """In a thread of a server's; a test may do what it likes."""
    event, deed = DEEDS[name]
    (tmp_path / "mine").mkdir()
    with assert_nothing_logged(audit_log):
        deed(tmp_path / "mine")

    def in_a_server() -> None:
        with assert_nothing_logged(audit_log):
            thread = threading.Thread(target=deed, args=(tmp_path,), name="server")
            thread.start()
            thread.join()

    with pytest.raises(AssertionError, match=event):
        in_a_server()


@pytest.mark.parametrize("of", [dict(os.environ), environment()], ids=["engine", "confined"])
def test_the_audit_hook_reports_calls_of_subprocesses(audit_log: Path, tmp_path: Path, of: dict[str, str]) -> None:
    """They get the hook with the path on which they find their modules."""
    given = {**of, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    code = f"open({str(tmp_path / 'x')!r}, 'w')"
    with pytest.raises(AssertionError, match="open"), assert_nothing_logged(audit_log):
        subprocess.run([sys.executable, "-P", "-c", code], env=given, cwd=ROOT, check=True)


def test_the_engine_has_the_hook(server: Running, audit_log: Path) -> None:
    """Its process holds the log open."""
    held = {os.path.realpath(link) for link in Path(f"/proc/{server.llm.pid}/fd").iterdir()}
    assert str(audit_log) in held
