"""Refusal of a connection's first request from its bytes, before the connection has an HTTP parser.

Most of the CPU time of a refused request goes into the objects of the parser and the application. A request in the common
form is therefore read by one regular expression, checked by the guard, and answered with the bytes that the parser would write.
Every other request, and each one that the guard does not refuse, takes the usual way.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import unquote

from headrace.server.http.api_error import ApiError

RawHeaders = list[tuple[bytes, bytes]]

LARGEST = 8192  # bytes of a request that is looked at
# One request line with a path, and header lines without folding: a part of what h11 accepts, read in the same way.
HEAD = re.compile(
    rb"(GET|POST|PUT|PATCH|DELETE|OPTIONS) (/[!-~]*) HTTP/1\.1\r\n((?:[-!#$%&'*+.^_`|~0-9A-Za-z]+:[\t -~]*\r\n){1,100})\r\n"
)


@dataclass(frozen=True, slots=True)
class Head:
    """Request line and headers, as an ASGI server hands them to the application."""

    method: str
    path: str
    headers: RawHeaders
    closes: bool  # the client asks to close the connection


def read_head(data: bytes, limit: int) -> Head | None:
    """The head of a request that is complete, alone and in the common form; otherwise None. `limit`: bytes of a head."""
    if len(data) > min(limit, LARGEST) or (match := HEAD.match(data)) is None:
        return None
    method, target, lines = match.groups()
    headers = []
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        headers.append((name.lower(), value.strip(b" \t")))
    known = dict(headers)
    length = known.get(b"content-length", b"0")
    if len(known) < len(headers) or b"host" not in known or b"transfer-encoding" in known or b"expect" in known:
        return None
    if not length.isdigit() or len(length) > 4 or int(length) != len(data) - match.end():
        return None
    closes = b"close" in map(bytes.strip, known.get(b"connection", b"").lower().split(b","))
    return Head(method.decode(), unquote(target.partition(b"?")[0].decode()), headers, closes)


def error_headers(error: ApiError, *, close: bool) -> RawHeaders:
    """Headers of an error's response; with `close` the connection ends after it."""
    headers = {"Content-Type": "application/json", **error.headers()} | ({"Connection": "close"} if close else {})
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def render(error: ApiError, head: Head, default_headers: Iterable[tuple[bytes, bytes]], request_id: str) -> bytes:
    """The complete response to a refused request, after which the connection closes; headers as uvicorn and h11 order them."""
    own = [*error_headers(error, close=not head.closes), (b"x-request-id", request_id.encode())]
    framing = [(b"Transfer-Encoding", b"chunked"), *([(b"Connection", b"close")] if head.closes else [])]
    lines = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
    lines += [b"%s: %s" % header for header in (*default_headers, *own, *framing)]
    body = error.body()
    return b"\r\n".join([*lines, b"", b"%x" % len(body), body, b"0", b"", b""])
