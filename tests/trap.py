"""A place on this machine that nothing may ask, and what a process reaches for."""

import contextlib
import socketserver
import sys
import threading
from collections.abc import Iterator
from typing import Any

_seen: list[tuple[str, Any]] = []
_watching = threading.Event()
_hooked: list[bool] = []


def _hook(event: str, arguments: Any) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "urllib.Request") and _watching.is_set():
        _seen.append((event, arguments[-1] if event == "socket.connect" else arguments[0]))


@contextlib.contextmanager
def reached() -> Iterator[list[tuple[str, Any]]]:
    """What this process tries to connect to, look up or fetch while this is entered. Audit hooks stay, so there is one."""
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked.append(True)
    _seen.clear()
    _watching.set()
    try:
        yield _seen
    finally:
        _watching.clear()


@contextlib.contextmanager
def trap() -> Iterator[tuple[str, list[bytes]]]:
    """The URL of a server on this machine that answers all with a schema, and the requests that it has got."""
    got: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            got.append(self.rfile.readline())
            self.wfile.write(b'HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{"const": 1}')

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/x", got
        finally:
            server.shutdown()
            thread.join()
