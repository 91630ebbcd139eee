"""The door: what every request passes before the application sees it. Plain ASGI."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headrace.confined.pool import BILL, CLIENT
from headrace.server.answers import new_id
from headrace.server.errors import ApiError, as_api_error
from headrace.server.keys import Keys
from headrace.server.logs import HTTP_REQUEST, answered
from headrace.server.page import files
from headrace.server.principals import PRINCIPAL, Principal, QuotaError
from headrace.server.settings import ServerSettings, is_loopback
from headrace.server.throttle import Bill, Throttle

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

PROBES = frozenset({"/health", "/live", "/ready"})  # which are answered however many requests are open
OPEN_PATHS = PROBES | frozenset(files.PATHS)  # what may be asked without a key
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")  # a client's own name for a request
ABSOLUTE = re.compile(r"https?://[^/]*", re.IGNORECASE)  # of a target in absolute form
UPLOAD_SPEED = 1 << 20  # bytes a second that a body must keep up with, beyond its first seconds
NOBODY, ANYBODY = Principal(""), Principal()  # without the key that is needed, and where none is
UPLOADS = "/v1/files"  # the one path that takes a form


class Guard:
    """Checks host, key, content type and size, and reads the body, bounded in bytes and time.

    Without a key only names of this machine are accepted as Host, so that no page of another site can reach the server
    through a name that it points here. A body must say that it is JSON: a form of another site cannot.
    """

    def __init__(self, app: App, settings: ServerSettings, keys: Keys, count: Callable[[int, str], None]) -> None:
        self._app = app  # what passes the door
        self._settings = settings
        self._keys = keys
        self._count = count  # is told the status of every response, and whose it is
        self._active = 0
        self.throttle = Throttle(settings.limits.overhead)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            CLIENT.set((scope.get("client") or ("",))[0])
            PRINCIPAL.set(NOBODY if self._keys.needed else ANYBODY)
            self._active += 1
            name = dict(scope["headers"]).get(b"x-request-id", b"")
            token = HTTP_REQUEST.set(name.decode() if REQUEST_ID.fullmatch(name) else new_id("req"))
            bill = Bill(self.throttle, CLIENT.get())
            BILL.set(bill.add)
            try:
                await self._admit(_of_head(scope), _counted(receive, bill), self._telling(scope, send, bill), bill)
            finally:
                HTTP_REQUEST.reset(token)
                self._active -= 1

    def _telling(self, scope: Message, send: Send, bill: Bill) -> Send:
        """A `send` under which an answer begins when it may, has its name, and is counted and logged."""
        begun = time.perf_counter()

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                if 400 <= message["status"] < 500 and message["status"] != 429:  # which says itself when to come again
                    bill.refused()
                await bill.settle()
                message = {**message, "headers": [*message.get("headers", []), (b"x-request-id", HTTP_REQUEST.get().encode())]}
                self._count(message["status"], PRINCIPAL.get().name)
                seconds = time.perf_counter() - begun
                answered(scope["method"], scope["path"], message["status"], seconds, PRINCIPAL.get().name)
            await send(message)

        return watched

    async def _admit(self, scope: Message, receive: Receive, send: Send, bill: Bill) -> None:
        try:
            if self._active > self._settings.limits.connections and scope["path"] not in PROBES:
                raise ApiError(503, "too many requests are open; try again", code="too_many_connections", retry_after=1)
            headers = dict(scope["headers"])
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            bill.client = CLIENT.get()
            if self.throttle.full(bill.client) and scope["path"] not in PROBES:
                message = "too many requests of this client were refused; their answers wait, and then so do others"
                raise ApiError(429, message, code="rate_limit_exceeded", retry_after=1)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                PRINCIPAL.get().charge("requests", 1)
                receive = await self._read(scope["path"], headers, receive)
        except (ApiError, QuotaError) as error:
            await send_error(send, as_api_error(error) or ApiError(500, "internal error"))
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        if self._keys.needed:
            return
        host = headers.get(b"host", b"").decode("latin-1")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if not is_loopback(name):
            raise ApiError(403, "without a key the server answers to localhost alone; use http://127.0.0.1 or set a key")

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        """Say who asks, to all that is done for it. Raises ApiError."""
        if path in OPEN_PATHS or not self._keys.needed:
            return
        kind, _, given = headers.get(b"authorization", b"bearer " + headers.get(b"x-api-key", b"")).partition(b" ")
        found = self._keys.of(given.strip())
        if found is None or kind.lower() != b"bearer":
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
            raise ApiError(401, message, code="invalid_api_key")
        PRINCIPAL.set(found)
        if not found.alone:
            CLIENT.set(found.name)

    async def _read(self, path: str, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """The whole body, and a `receive` that gives it once and then waits for the client to go."""
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        upload = path == UPLOADS and kind == b"multipart/form-data"
        if upload or _has_no_body(headers):
            _check_origin(headers)
        elif kind != b"application/json":
            raise ApiError(415, "send JSON, with the header 'Content-Type: application/json'")
        limits = self._settings.limits
        most = limits.file if upload else limits.body
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            raise _too_large(most)
        seconds = limits.body_seconds + (int(announced) / UPLOAD_SPEED if announced.isdigit() else 0)
        if b"transfer-encoding" in headers or not announced.isdigit():
            receive = _charged(receive)
        else:
            PRINCIPAL.get().charge("bytes", int(announced))
        if upload:
            return _bounded(receive, most, seconds)
        try:
            async with asyncio.timeout(seconds):
                body = await _body(receive, most)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {seconds:.3g} s") from None
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay


def _has_no_body(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers


def _check_origin(headers: dict[bytes, bytes]) -> None:
    """A form is what a page of another site can send without asking; browsers then say where it comes from."""
    origin = headers.get(b"origin")
    if origin is not None and origin.partition(b"://")[2] != headers.get(b"host", b""):
        raise ApiError(403, "this is not taken from pages of other sites")


def _of_head(scope: Message) -> Message:
    """The head as routes read it: HEAD as GET (the connection leaves the body out), an absolute target as its path."""
    if (found := ABSOLUTE.match(scope["path"])) is not None:
        path = scope["path"][found.end() :] or "/"
        scope = {**scope, "path": path, "raw_path": path.encode()}
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


async def _body(receive: Receive, limit: int) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client went away")
        parts += message.get("body", b"")
        if len(parts) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(parts)


def _bounded(receive: Receive, limit: int, seconds: float) -> Receive:
    """A `receive` for a body that is kept as it comes: of so many bytes, with so long for the client to send them.

    It raises ApiError.
    """
    size, waited = 0, 0.0

    async def bounded() -> Message:
        nonlocal size, waited
        begun = time.monotonic()
        try:
            async with asyncio.timeout(max(seconds - waited, 0)):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {seconds:.3g} s") from None
        waited += time.monotonic() - begun
        size += len(message.get("body", b""))
        if size > limit:
            raise _too_large(limit)
        return message

    return bounded


def _counted(receive: Receive, bill: Bill) -> Receive:
    """A `receive` that tells how much came."""

    async def counted() -> Message:
        message = await receive()
        bill.size += len(message.get("body", b""))
        return message

    return counted


def _charged(receive: Receive) -> Receive:
    """A `receive` for a body of which nobody has said how long it is."""

    async def charged() -> Message:
        message = await receive()
        PRINCIPAL.get().charge("bytes", len(message.get("body", b"")))
        return message

    return charged


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes; send less", code="body_too_large")


async def send_error(send: Send, error: ApiError) -> None:
    """A whole response, after which the connection closes."""
    headers = {"Content-Type": "application/json", "Connection": "close", **error.headers()}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": error.body()})
