"""One connection of a client: HTTP/1.1 by uvicorn, with a limit on how long a request's head may take."""

import asyncio
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

CHUNK = "chunk"  # where a request's state has the connection's short way
HEAD = 64 << 10  # bytes of a request's head where nothing else is said


class Turn:
    """What was written in this turn of the event loop; it is sent at its end, all connections in one go."""

    def __init__(self) -> None:
        self._written: list[Joined] = []

    def add(self, joined: "Joined") -> None:
        if not self._written:
            asyncio.get_running_loop().call_soon(self._end)
        self._written.append(joined)

    def _end(self) -> None:
        written, self._written = self._written, []
        for joined in written:
            joined.flush()


class Joined:
    """A transport that sends what is written in one turn of the event loop in one piece: of a streamed answer several events,
    its last one and the end. Everything else is the transport's own."""

    def __init__(self, transport: asyncio.Transport, turn: Turn) -> None:
        self._transport = transport
        self._turn = turn
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._turn.add(self)
        self._parts.append(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        if self._parts and not self._transport.is_closing():
            self._transport.write(b"".join(self._parts))
        self._parts.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Chunks(h11.Connection):
    """h11's connection, which knows whether an answer is being sent in chunks."""

    chunked = False

    def send(self, event: Any) -> Any:
        data = super().send(event)
        if isinstance(event, h11.Response):
            self.chunked = b"transfer-encoding: chunked" in (data or b"").lower()
        elif isinstance(event, h11.EndOfMessage):
            self.chunked = False
        return data


class Connection(H11Protocol):
    """Closes a connection whose next request does not arrive whole within `head_seconds` of its first byte, or, for the
    first request, of connecting (slow loris), and one whose client leaves what was sent unread for `send_seconds`."""

    head_seconds = 10.0
    send_seconds = 60.0
    turn = Turn()
    _clock: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None

    def __init__(self, config: uvicorn.Config, *more: Any, **options: Any) -> None:
        super().__init__(config, *more, **options)
        self.conn: Chunks = Chunks(h11.SERVER, config.h11_max_incomplete_event_size or HEAD)
        self.app_state = {**self.app_state, CHUNK: self.chunk}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Joined(transport, self.turn))  # type: ignore[arg-type]
        self._start()

    def chunk(self, data: bytes) -> bool:
        """Send a part of a streamed answer, past the layers that would pass it on unchanged: a chunk is its length and its
        bytes. False, and nothing is sent, where the answer is in no chunks or the client has to be waited for."""
        if not self.conn.chunked or self.flow.write_paused:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # a part of a head, or nothing
            self._start()
        else:
            self._stop()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0] and self.conn.their_state is h11.IDLE:
            self._start()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader is None:
            self._reader = self.loop.call_later(self.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._read_on()
        super().connection_lost(exc)

    def _start(self) -> None:
        if self._clock is None:
            self._clock = self.loop.call_later(self.head_seconds, self._close)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _read_on(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def connection(head_seconds: float, send_seconds: float) -> Callable[..., Any]:
    """The protocol class with these limits."""
    limits = {"head_seconds": head_seconds, "send_seconds": send_seconds, "turn": Turn()}
    return type("Connection", (Connection,), limits)
