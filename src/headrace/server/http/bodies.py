"""Receiving request bodies: limits of their size, their time, and the memory of all of them together."""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from headrace.confined.pool import CLIENT
from headrace.server.http.api_error import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class IncomingBody:
    """A body that is arriving."""

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self.data = bytearray()
        self.deadline = deadline
        self.dropped = False


class BodyMemory:
    """All arriving bodies, at most `most` bytes together.

    Above that, the client with the most bytes loses its oldest body, which gets a 503. A client with many endless bodies loses
    them, while the bodies of other clients and its own newer ones arrive.
    """

    def __init__(self, most: int) -> None:
        self.size = 0  # bytes
        self._most = most
        self._bodies: dict[str, dict[IncomingBody, None]] = {}  # by client, oldest first

    async def read(self, receive: Receive, limit: int, seconds: float) -> bytes:
        """Receive a complete body of at most `limit` bytes within `seconds`. Raises ApiError."""
        client = CLIENT.get()
        body: IncomingBody | None = None
        try:
            async with asyncio.timeout(seconds) as deadline:
                body = IncomingBody(deadline)
                self._bodies.setdefault(client, {})[body] = None
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the client closed the connection before its body was complete")
                    self._add(body, message.get("body", b""))
                    if body.dropped:
                        raise _too_many()
                    if len(body.data) > limit:
                        raise too_large(limit)
                    if not message.get("more_body", False):
                        return bytes(body.data)
        except TimeoutError:
            raise (_too_many() if body is not None and body.dropped else too_late(seconds)) from None
        finally:
            if body is not None and not body.dropped:
                self._remove(client, body)

    def _add(self, body: IncomingBody, part: bytes) -> None:
        body.data += part
        self.size += len(part)
        while self.size > self._most:
            client = max(self._bodies, key=lambda name: sum(len(one.data) for one in self._bodies[name]))
            self._drop(client, next(one for one in self._bodies[client] if one.data))

    def _drop(self, client: str, body: IncomingBody) -> None:
        self._remove(client, body)
        body.dropped = True
        body.data.clear()
        if not body.deadline.expired():
            body.deadline.reschedule(asyncio.get_running_loop().time())

    def _remove(self, client: str, body: IncomingBody) -> None:
        self.size -= len(body.data)
        del self._bodies[client][body]
        if not self._bodies[client]:
            del self._bodies[client]


def limited_receive(receive: Receive, limit: int, seconds: float) -> Receive:
    """Wrap `receive` for a body that is processed in parts: at most `limit` bytes, at most `seconds` of waiting for the client.
    It raises ApiError."""
    size, waited = 0, 0.0

    async def receive_part() -> Message:
        nonlocal size, waited
        began = time.monotonic()
        try:
            async with asyncio.timeout(max(seconds - waited, 0)):
                message = await receive()
        except TimeoutError:
            raise too_late(seconds) from None
        waited += time.monotonic() - began
        size += len(message.get("body", b""))
        if size > limit:
            raise too_large(limit)
        return message

    return receive_part


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the complete body first, then waits for the client to disconnect."""
    sent = False

    async def receive_again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes; send less", code="body_too_large")


def too_late(seconds: float) -> ApiError:
    return ApiError(408, f"the body did not arrive within {seconds:.3g} s; send it faster, or less")


def _too_many() -> ApiError:
    message = "too many bytes of request bodies are arriving at once; send fewer requests at a time, and try again in 1 s"
    return ApiError(503, message, code="too_many_bytes", retry_after=1)
