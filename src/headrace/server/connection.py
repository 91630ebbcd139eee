"""Connections of clients: HTTP/1.1 by uvicorn, with limits on their number, their time, and what they may send."""

import asyncio
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.server.throttle import Throttle

CHUNK = "chunk"  # where a request's state has the connection's short way
HEAD = 64 << 10  # bytes of a request's head where nothing else is said
REFUSED = 256 << 20  # bytes that a client may send after it was refused; they are read away
FREE_CHUNKS, MEAN_CHUNK = 1000, 64  # so many chunks of a body may be small; all of them have so many bytes on average


class Crowd:
    """All connections of a server. Beyond `most` those without a request make room: first those whose clients never asked
    anything, then those kept for the next request, and of each the one that has waited longest."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._all: set[Connection] = set()
        self._new: dict[Connection, None] = {}
        self._kept: dict[Connection, None] = {}

    def enter(self, one: "Connection") -> None:
        self._all.add(one)
        while len(self._all) > self.most and (waiting := self._new or self._kept):
            last = next(iter(waiting))
            self.leave(last)
            last.transport.abort()
        self._new[one] = None

    def works(self, one: "Connection") -> None:
        """It has a request."""
        self._new.pop(one, None)
        self._kept.pop(one, None)

    def waits(self, one: "Connection") -> None:
        """It has none any more."""
        self._kept[one] = None

    def leave(self, one: "Connection") -> None:
        self._all.discard(one)
        self.works(one)


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

    def __init__(self, transport: asyncio.Transport, turn: Turn, linger: Callable[[], bool]) -> None:
        self._transport = transport
        self._turn = turn
        self._linger = linger
        self._ended = False
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._turn.add(self)
        self._parts.append(data)

    def close(self) -> None:
        self.flush()
        lingers = not self.is_closing() and self._linger()
        self._ended = True
        if not lingers:
            self._transport.close()

    def is_closing(self) -> bool:
        return self._ended or self._transport.is_closing()

    def flush(self) -> None:
        if self._parts and not self._transport.is_closing():
            self._transport.write(b"".join(self._parts))
        self._parts.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Chunks(h11.Connection):
    """h11's connection, which knows whether an answer is being sent in chunks, and takes no body in crumbs: each chunk costs
    as much as a request's line. An answer that comes before its request is whole is the last one: nobody reads the rest."""

    chunked = False
    chunks = _bytes = 0  # of a body so far

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self.chunks += event.chunk_end
            self._bytes += len(event.data)
            if self.chunks > FREE_CHUNKS + self._bytes // MEAN_CHUNK:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event

    def send(self, event: Any) -> Any:
        if isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            headers = [*event.headers.raw_items(), (b"connection", b"close")]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        data = super().send(event)
        if isinstance(event, h11.Response):
            self.chunked = b"transfer-encoding: chunked" in (data or b"").lower()
        elif isinstance(event, h11.EndOfMessage):
            self.chunked = False
        return data


class Connection(H11Protocol):
    """Closes a connection whose next request does not arrive whole within `head_seconds` of its first byte, or, for the
    first request, of connecting (slow loris), and one whose client leaves what was sent unread for `send_seconds`.

    A client that is refused while it sends would lose the answer if the connection were closed then: what it sends is read
    away for `body_seconds`, up to REFUSED bytes."""

    head_seconds = 10.0
    send_seconds = 60.0
    body_seconds = 30.0
    turn = Turn()
    crowd = Crowd(1 << 20)
    throttle = Throttle(1.0)
    _refused: int | None = None  # bytes that were read away
    _clock: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None

    def __init__(self, config: uvicorn.Config, *more: Any, **options: Any) -> None:
        super().__init__(config, *more, **options)
        self.conn: Chunks = Chunks(h11.SERVER, config.h11_max_incomplete_event_size or HEAD)
        self.app_state = {**self.app_state, CHUNK: self.chunk}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Joined(transport, self.turn, self._linger))  # type: ignore[arg-type]
        self.crowd.enter(self)
        self._start()

    def chunk(self, data: bytes) -> bool:
        """Send a part of a streamed answer, past the layers that would pass it on unchanged: a chunk is its length and its
        bytes. False, and nothing is sent, where the answer is in no chunks or the client has to be waited for."""
        if not self.conn.chunked or self.flow.write_paused:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            self._refused += len(data)
            if self._refused > REFUSED:
                self.transport.close()
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # a part of a head, or nothing
            self._start()
        else:
            self._stop()
            if self.cycle is not None and not self.transport.is_closing():
                self.crowd.works(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self.crowd.waits(self)
        if self.conn.trailing_data[0] and self.conn.their_state is h11.IDLE:
            self._start()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered when its client's turn has come, as every refusal is."""
        wait = self.throttle.refuse(self.client[0] if self.client else "", self.conn.chunks)
        if not wait:
            super().send_400_response(msg)
            return
        self.flow.pause_reading()
        self.loop.call_later(wait, self._refuse, msg)

    def _refuse(self, msg: str) -> None:
        if not self.transport.is_closing():
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:
                self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader is None:
            self._reader = self.loop.call_later(self.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self.crowd.leave(self)
        self._stop()
        self._read_on()
        super().connection_lost(exc)

    def _linger(self) -> bool:
        """Whether the connection stays open for what its client is still sending; nothing more is written."""
        if self.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            return False
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:  # it has just gone
            return False
        self._refused = 0
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self._stop()
        self._clock = self.loop.call_later(self.body_seconds, self.transport.close)
        self.crowd.waits(self)
        return True

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


def connection(most: int = 1 << 20, throttle: Throttle | None = None, **seconds: float) -> Callable[..., Any]:
    """The protocol class for a server of so many connections; `seconds` are those of Connection."""
    own = {"crowd": Crowd(most), "turn": Turn(), "throttle": throttle or Throttle(1.0)}
    return type("Connection", (Connection,), {**seconds, **own})
