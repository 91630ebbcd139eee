"""Guard: an ASGI application that checks source, key, type and size of each request in front of the server's application.

Most of the CPU time of a refused request goes into the objects of the parser and the application. A connection's first request
in the common form is therefore read by one regular expression before the connection has a parser, checked by the guard, and
answered with the bytes that the parser would write. Every other request, and each one that the guard does not refuse, takes
the usual way.
"""

import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import Token
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from headrace.confined.pool import CLIENT
from headrace.server.access.keys import KeyRing
from headrace.server.access.principals import PRINCIPAL, Principal, QuotaError
from headrace.server.http.api_error import ApiError
from headrace.server.http.bodies import BodyMemory, Receive, limited_receive, replay_body, too_large
from headrace.server.http.connection import ADMIT
from headrace.server.http.errors import as_api_error
from headrace.server.http.pace import PUBLIC, Pace
from headrace.server.http.proxies import client_group
from headrace.server.logs import HTTP_REQUEST, REQUESTS, BurstLog, log_response
from headrace.server.settings import ServerSettings, is_loopback

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

PROBES = frozenset({"/health", "/live", "/ready"})
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")  # an x-request-id that a client may choose
ABSOLUTE = re.compile(r"https?://(?:[^/]*@)?([^/]*)", re.IGNORECASE)  # start of a target in absolute form, with its host
UPLOAD_SPEED = 1 << 20  # bytes/s that a body must reach after its first seconds
NO_KEY, LOCAL = Principal(""), Principal()  # of requests without a valid key, and on a server without keys
FORM_FIELDS = 1 << 20  # bytes of a form next to its sound file
JSON, FORM, PARTS = b"application/json", b"application/x-www-form-urlencoded", b"multipart/form-data"
# Browsers send at least one of these with every request of another site's page, except links and images.
BROWSER = (b"origin", b"sec-fetch-site", b"referer")

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


class Guard:
    """Checks source, key, content type and size of each request, and reads its body.

    A request without a valid key is refused and its connection closes; it counts for no limit of requests with a key. A server
    without keys serves programs of this machine and its own page: it accepts only loopback names as Host, and refuses requests
    from pages of other sites. Probes and the paths in `public` need no key, and are answered however many requests are open.
    `count` receives the status of each response and the name of its principal. `pace` delays refusals of principals that
    repeat them, by name ("" without a valid key). `public_pace` delays answers without a key, by address.
    """

    def __init__(
        self,
        app: App,
        settings: ServerSettings,
        keys: KeyRing,
        count: Callable[[int, str], None],
        public: Iterable[str] = (),
        pace: Pace | None = None,
        public_pace: Pace | None = None,
    ) -> None:
        self._open_paths = PROBES.union(public)
        self._app = app
        self._limits = settings.limits
        # Paths that accept multipart forms, and the bytes of a form.
        sound = settings.limits.audio_bytes + FORM_FIELDS
        self._forms = {
            "/v1/files": settings.limits.file,
            "/v1/audio/transcriptions": sound,
            "/v1/audio/translations": sound,
        }
        self._proxies = settings.proxies
        self._keys = keys
        self._count = count
        self._open: Counter[str] = Counter()  # admitted requests by principal
        self._bodies = BodyMemory(settings.limits.bodies)
        self._refused = BurstLog(REQUESTS, logging.INFO, "refused")
        self.pace = pace or Pace()
        self.public_pace = public_pace or Pace(rate=PUBLIC)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            scope = _as_routed(scope)
            headers = dict(scope["headers"])
            peer = (scope.get("client") or ("",))[0]
            scope["scheme"] = self._proxies.scheme(peer, headers, scope.get("scheme", "http"))
            token = self._begin(peer, scope["headers"], headers)
            try:
                await self._admit(scope, headers, receive, send)
            finally:
                HTTP_REQUEST.reset(token)

    def refuse_early(self, data: bytes, peer: str, default_headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
        """Return the complete response to a connection's first bytes, if they are a request that can be refused without a
        parser; otherwise None. `peer`: address of the connection. `default_headers`: headers of every response."""
        if (head := read_head(data, self._limits.header)) is None:
            return None
        headers = dict(head.headers)
        token = self._begin(peer, head.headers, headers)
        try:
            if (error := self._refusal(head.method, head.path, headers)) is None:
                return None
            self._count(error.status, PRINCIPAL.get().name)
            return render(error, head, default_headers, HTTP_REQUEST.get())
        finally:
            HTTP_REQUEST.reset(token)

    def _begin(self, peer: str, raw_headers: RawHeaders, headers: dict[bytes, bytes]) -> Token[str]:
        """Set the context variables of a request: client, principal and request id. The token resets the request id."""
        CLIENT.set(self._proxies.client(peer, raw_headers))
        PRINCIPAL.set(NO_KEY if self._keys.needed else LOCAL)
        name = headers.get(b"x-request-id", b"")
        return HTTP_REQUEST.set(name.decode() if REQUEST_ID.fullmatch(name) else f"req_{secrets.token_hex(12)}")

    def _refusal(self, method: str, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        """Check source and key, and set the principal. Returns the error of a refused request, which is logged."""
        try:
            self._check_source(headers)
            if path not in self._open_paths:
                self._authenticate(headers)
        except ApiError as error:
            self._refused.add(CLIENT.get(), f"{error.status}, {method} {ascii(path)[1:-1]}")
            return error
        return None

    async def _admit(self, scope: Message, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        refusal = Refusal(send)
        if (error := self._refusal(scope["method"], scope["path"], headers)) is not None:
            await send_error(self._counted(refusal.send), error, close=True)
            await refusal.end(self.pace, NO_KEY.name)
            return
        sending = self._logged(scope, self._counted(refusal.send), began)
        if scope["path"] in self._open_paths:
            await self.public_pace.turn(client_group(CLIENT.get()))
            await self._app(scope, receive, sending)
        else:
            scope.get("state", {}).get(ADMIT, bool)(PRINCIPAL.get().name)
            await self._serve(scope, headers, receive, sending)
        await refusal.end(self.pace, PRINCIPAL.get().name)

    async def _serve(self, scope: Message, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        """Pass an admitted request to the application, if its principal may have one more open and has quota left."""
        principal = PRINCIPAL.get()
        name = principal.name
        if principal.room(self._limits.connections, self._open.total(), self._open[name]) <= 0:
            message = "too many requests are open; try again in 1 s"
            await send_error(send, ApiError(503, message, code="too_many_connections", retry_after=1))
            return
        self._open[name] += 1
        try:
            if scope["method"] in ("POST", "PUT", "PATCH"):
                principal.charge("requests", 1)
                receive = await self._read(scope["path"], headers, receive)
        except (ApiError, QuotaError) as error:
            await send_error(send, as_api_error(error) or ApiError(500, "internal error"))
            return
        else:
            await self._app(scope, receive, send)
        finally:
            self._open -= Counter([name])

    def _counted(self, send: Send) -> Send:
        """Wrap `send`: count the response and add its x-request-id."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = (b"x-request-id", HTTP_REQUEST.get().encode())
                message = {**message, "headers": [*message.get("headers", []), name]}
                self._count(message["status"], PRINCIPAL.get().name)
            await send(message)

        return counted

    def _logged(self, scope: Message, send: Send, began: float) -> Send:
        """Wrap `send`: log the response."""

        async def logged(message: Message) -> None:
            if message["type"] == "http.response.start":
                seconds = time.perf_counter() - began
                log_response(scope["method"], scope["path"], message["status"], seconds, PRINCIPAL.get().name)
            await send(message)

        return logged

    def _check_source(self, headers: dict[bytes, bytes]) -> None:
        """Raises ApiError for WebSockets and, on a server without keys, for requests that a page of another site may send."""
        if not self._keys.needed:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
            if not is_loopback(name):
                message = "without a key the server answers to localhost alone; use http://127.0.0.1 or set a key"
                raise ApiError(403, message)
            if _is_cross_site(headers):
                raise ApiError(403, "without a key the server answers no pages of other sites; use its own page, or set a key")
        if headers.get(b"upgrade", b"").lower() == b"websocket":
            raise ApiError(400, "this server has no WebSockets; send HTTP requests, with stream: true", code="no_websockets")

    def _authenticate(self, headers: dict[bytes, bytes]) -> None:
        """Set the request's principal, and its client, from its API key. Raises ApiError (401) if it is missing or wrong."""
        if not self._keys.needed:
            return
        kind, _, given = headers.get(b"authorization", b"bearer " + headers.get(b"x-api-key", b"")).partition(b" ")
        principal = self._keys.of(given.strip())
        if principal is None or kind.lower() != b"bearer":
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
            raise ApiError(401, message, code="invalid_api_key")
        PRINCIPAL.set(principal)
        if not principal.alone:
            CLIENT.set(principal.name)

    async def _read(self, path: str, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Read the body and return a `receive` with it for the application. Raises ApiError, QuotaError."""
        upload = _check_type(headers, path in self._forms)
        limit = self._forms[path] if upload else self._limits.body
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > limit:
            raise too_large(limit)
        seconds = self._limits.body_seconds + (int(announced) / UPLOAD_SPEED if announced.isdigit() else 0)
        if b"transfer-encoding" in headers or not announced.isdigit():
            receive = _charged(receive)
        else:
            PRINCIPAL.get().charge("bytes", int(announced))
        if upload:
            return limited_receive(receive, limit, seconds)
        return replay_body(await self._bodies.read(receive, limit, seconds), receive)


class Refusal:
    """The response to one request, if it is a refusal (4xx): kept until the application has returned, so that a refusal that
    waits holds neither a body nor a place among the open requests. Every other response is sent as it comes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._kept: list[Message] = []

    async def send(self, message: Message) -> None:
        if self._kept or (message["type"] == "http.response.start" and 400 <= message["status"] < 500):
            self._kept.append(message)
        else:
            await self._send(message)

    async def end(self, pace: Pace, client: str) -> None:
        """Send a refusal when the pace of `client` allows it."""
        if self._kept:
            await pace.turn(client)
        for message in self._kept:
            await self._send(message)


def _as_routed(scope: Message) -> Message:
    """Return a copy of the scope for the router: HEAD becomes GET (uvicorn drops the body), an absolute target becomes its
    path, and its host replaces the Host header (RFC 9112, 3.2.2)."""
    scope = {**scope, "method": "GET" if scope["method"] == "HEAD" else scope["method"]}
    if (match := ABSOLUTE.match(scope["path"])) is not None:
        path = scope["path"][match.end() :] or "/"
        others = [one for one in scope["headers"] if one[0] != b"host"]
        scope |= {
            "path": path,
            "raw_path": path.encode(),
            "headers": [(b"host", match[1].encode("latin-1", "replace")), *others],
        }
    return scope


def _is_cross_site(headers: dict[bytes, bytes]) -> bool:
    """Return whether a page of another site sent the request. Browsers send Origin with all requests except plain GETs, and
    Sec-Fetch-Site with those too. A link from another site to the server's page is allowed."""
    origin = headers.get(b"origin")
    if origin is not None:
        return origin.partition(b"://")[2] != headers.get(b"host", b"")
    site, mode = headers.get(b"sec-fetch-site", b"none"), headers.get(b"sec-fetch-mode")
    return site not in (b"none", b"same-origin") and mode != b"navigate"


def _check_type(headers: dict[bytes, bytes], takes_forms: bool) -> bool:
    """Return whether the body is an upload, on a path that takes forms. Raises ApiError (415) if it is neither an upload nor
    JSON, or if it is compressed.

    `curl -d` declares a form, and some clients declare no type: both count as JSON unless a browser may have sent them. A page
    of another site can send these types without a preflight request, but not a declared JSON body.
    """
    encoding = headers.get(b"content-encoding", b"").strip().lower()
    if encoding not in (b"", b"identity"):
        name = ascii(encoding[:40].decode("latin-1"))
        raise ApiError(415, f"the body has the Content-Encoding {name}; send it without compression")
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if takes_forms and kind == PARTS:
        return True
    has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    browser = b"mozilla" in headers.get(b"user-agent", b"").lower() or any(name in headers for name in BROWSER)
    if has_body and kind != JSON and (browser or kind not in (b"", FORM)):
        raise ApiError(415, "send JSON, with the header 'Content-Type: application/json'")
    return False


def _charged(receive: Receive) -> Receive:
    """Wrap `receive` for a body of unknown size: charge its bytes as they arrive. It raises QuotaError."""

    async def charged() -> Message:
        message = await receive()
        PRINCIPAL.get().charge("bytes", len(message.get("body", b"")))
        return message

    return charged


async def send_error(send: Send, error: ApiError, close: bool = False) -> None:
    """Send a complete error response; with `close` the connection closes after it."""
    raw = error_headers(error, close=close)
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": error.body()})
