"""Server-sent events, and requests whose client disconnects."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.server.http.api_error import ApiError
from headrace.server.http.connection import CHUNK
from headrace.server.http.errors import as_api_error

log = logging.getLogger("headrace.server")

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class ClientGoneError(Exception):
    """The client disconnected."""


def sse_event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, cancels it and raises ClientGoneError."""
    return await _race(work, request.receive)


async def _race(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come. Ends if the client disconnects. An error is sent as the last event.

    `first` is awaited before the response starts, so that a request that fails at once gets the status of its error.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncIterator[bytes], on_end: Callable[[], None], done: bytes = DONE) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._done = done
        self.on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGoneError):
                await _race(self._send(send, scope.get("state", {}).get(CHUNK, _send_slowly)), receive)
        finally:
            self.on_end()

    async def _send(self, send: Send, short: Callable[[bytes], bool]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _send_part(send, self._first)
        try:
            async for data in self._events:
                if not short(data):
                    await _send_part(send, data)
        except Exception as error:
            await _send_part(send, b"data: " + self._error_body(error) + b"\n\n")
        if self._done:
            await _send_part(send, self._done)
        await send({"type": "http.response.body", "body": b""})

    def _error_body(self, error: Exception) -> bytes:
        known = as_api_error(error)
        if known is None:
            log.error("a stream failed", exc_info=error)
            known = ApiError(500, "internal error; see the server's log", code="internal_error")
        return known.body()


def _send_slowly(data: bytes) -> bool:
    return False


async def start_stream(
    events: AsyncIterator[bytes], http: Request, on_end: Callable[[], None], done: bytes = DONE
) -> EventStream:
    """A stream whose first event exists. If there is none, calls `on_end` and raises the error, or ClientGoneError."""
    try:
        first: bytes = await unless_disconnected(http, anext(events))  # type: ignore[arg-type]
    except BaseException:
        on_end()
        raise
    return EventStream(first, events, on_end, done)


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
