"""The door: what every request passes before the application sees it. Plain ASGI."""

import asyncio
import contextlib
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headrace.confined.pool import CLIENT
from headrace.server.errors import ApiError
from headrace.server.page import files
from headrace.server.settings import ServerSettings, is_loopback

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

KIND, KIND_SECONDS = 1 << 20, 1.0  # bytes and seconds of a refused body that are still read
OPEN_PATHS = frozenset({"/health", *files.PATHS})  # what may be asked without a key
UPLOAD_SPEED = 1 << 20  # bytes a second that a body must keep up with, beyond its first seconds
UPLOADS = "/v1/files"  # the one path that takes a form


class Guard:
    """Checks host, key, content type and size, and reads the body, bounded in bytes and time.

    Without a key only names of this machine are accepted as Host, so that no page of another site can reach the server
    through a name that it points here. A body must say that it is JSON: a form of another site cannot.
    """

    def __init__(self, app: App, settings: ServerSettings, count: Callable[[int], None]) -> None:
        self._app = app  # what passes the door
        self._settings = settings
        self._count = count  # is told the status of every response
        self._active = 0
        self._key = settings.key.encode() if settings.key is not None else None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            CLIENT.set((scope.get("client") or ("",))[0])
            self._active += 1
            try:
                await self._admit(scope, receive, _counting(send, self._count))
            finally:
                self._active -= 1

    async def _admit(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            if self._active > self._settings.limits.connections:
                raise ApiError(503, "too many requests are open; try again", code="too_many_connections", retry_after=1)
            headers = dict(scope["headers"])
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                receive = await self._read(scope["path"], headers, receive)
        except ApiError as error:
            if error.status != 408:
                await _discard(receive, max(self._settings.limits.body, KIND))
            await send_error(send, error)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        if self._key is not None:
            return
        host = headers.get(b"host", b"").decode("latin-1")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if not is_loopback(name):
            raise ApiError(403, "without a key the server answers to localhost alone; use http://127.0.0.1 or set a key")

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or path in OPEN_PATHS:
            return
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if not hmac.compare_digest(given.strip(), self._key) or kind.lower() != b"bearer":
            raise ApiError(
                401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
            )

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


def _counting(send: Send, count: Callable[[int], None]) -> Send:
    async def counted(message: Message) -> None:
        if message["type"] == "http.response.start":
            count(message["status"])
        await send(message)

    return counted


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
            if message.get("more_body", False):
                await _discard(receive, KIND)
            raise _too_large(limit)
        return message

    return bounded


async def _discard(receive: Receive, limit: int) -> None:
    """Read a refused body, within bounds: a client that is still sending when the connection closes loses the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KIND_SECONDS):
            while limit > 0 and (message := await receive()).get("more_body", False):
                limit -= len(message.get("body", b""))


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes; send less", code="body_too_large")


async def send_error(send: Send, error: ApiError) -> None:
    """A whole response. The connection closes: what is left of a refused body is not read."""
    headers = {"Content-Type": "application/json", "Connection": "close", **error.headers()}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": error.body()})
