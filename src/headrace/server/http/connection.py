"""Client connections: uvicorn's HTTP/1.1 protocol with limits on connections, times, heads and bodies.

`ConnectionTable` decides which open connection closes to make room for another.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.server import ServerState

from headrace.server.http.api_error import ApiError
from headrace.server.http.pace import Pace
from headrace.server.http.proxies import Proxies, client_group
from headrace.server.logs import BurstLog

log = logging.getLogger("headrace.server")

# Names in a request's state under which the application finds functions of its connection.
CHUNK = "chunk"  # Connection.chunk
ADMIT = "admit"  # Connection.admit
HEAD = 64 << 10  # bytes of a request's head, by default
HEADERS = 100  # of a request, and trailers of a body: each costs CPU time before the guard runs
INVALID = "the request is not valid HTTP/1.1"
MOST_DROPPED = 256 << 20  # bytes of a refused request that the server reads and drops
FREE_CHUNKS, MEAN_CHUNK = 1000, 64  # a body with more chunks must have MEAN_CHUNK bytes per chunk


Refuse = Callable[[bytes, str, list[tuple[bytes, bytes]]], bytes | None]

GRACE = 1.0  # seconds in which the limit of its address closes no new connection: its request may not have arrived


class TrackedConnection(Protocol):
    """A connection in the table."""

    address: str  # of the client

    def abort(self) -> None:
        """Close the connection now, without an answer."""


class ConnectionTable:
    """All connections of one server, at most `most`.

    A connection is anonymous until the server admits a request on it: one with a valid key, or, on a server without keys, one
    that is not refused. An address may have `anonymous` of these; one more closes its oldest. Above `most`, the table closes
    the oldest anonymous connection of the address with the most of them, then the admitted connection that has been idle for
    the longest time. It never closes an admitted connection with a request.
    """

    def __init__(self, most: int, anonymous: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self._limit = anonymous
        self._clock = clock
        self._all: set[TrackedConnection] = set()
        # By address: start time of each connection, oldest first.
        self._anonymous: dict[str, dict[TrackedConnection, float]] = {}
        self._idle: dict[TrackedConnection, None] = {}  # admitted, without a request; idle for the longest time first

    def add(self, connection: TrackedConnection, limited: bool = True) -> None:
        """Add a new connection. `limited`: the limit of its address applies."""
        now = self._clock()
        self._all.add(connection)
        group = self._anonymous.setdefault(connection.address, {})
        group[connection] = now
        while limited and len(group) > self._limit and now - group[oldest := next(iter(group))] >= GRACE:
            self._close(oldest)
        while len(self._all) > self.most and (victim := self._victim(connection)) is not None:
            self._close(victim)

    def admit(self, connection: TrackedConnection) -> None:
        """Mark a connection as admitted."""
        group = self._anonymous.get(connection.address, {})
        if group.pop(connection, None) is not None and not group:
            del self._anonymous[connection.address]

    def mark_busy(self, connection: TrackedConnection) -> None:
        """Mark a connection as one with a request."""
        self._idle.pop(connection, None)

    def mark_idle(self, connection: TrackedConnection) -> None:
        """Mark a connection as one without a request."""
        if connection in self._all and connection not in self._anonymous.get(connection.address, ()):
            self._idle[connection] = None

    def remove(self, connection: TrackedConnection) -> None:
        """Remove a connection that has ended."""
        self._all.discard(connection)
        self._idle.pop(connection, None)
        self.admit(connection)

    def _victim(self, newest: TrackedConnection) -> TrackedConnection | None:
        """Return the connection to close in favour of `newest`, or None if every other one has a request."""
        group = max(self._anonymous.values(), key=len)
        oldest = next(iter(group))
        return oldest if oldest is not newest else next(iter(self._idle), None)

    def _close(self, connection: TrackedConnection) -> None:
        self.remove(connection)
        connection.abort()


class WriteBatch:
    """Transports with data written in the current iteration of the event loop; they are flushed at its end."""

    def __init__(self) -> None:
        self._written: list[BatchedTransport] = []

    def add(self, transport: "BatchedTransport") -> None:
        if not self._written:
            asyncio.get_running_loop().call_soon(self._end)
        self._written.append(transport)

    def _end(self) -> None:
        written, self._written = self._written, []
        for transport in written:
            transport.flush()


class BatchedTransport:
    """A transport that joins the writes of one event loop iteration into one `send`. `linger` decides at `close` whether the
    connection stays open for reading. Everything else is the wrapped transport's."""

    def __init__(self, transport: asyncio.Transport, writes: WriteBatch, linger: Callable[[], bool]) -> None:
        self._transport = transport
        self._writes = writes
        self._linger = linger
        self._ended = False
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._writes.add(self)
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


class RefusedError(h11.RemoteProtocolError):
    """A request that this server reads no further; the text is for the client."""


def has_many_lines(data: bytes | bytearray) -> bool:
    """Return whether a head, or trailers, at the start of `data` have more than HEADERS lines between the first line and the
    blank one. Looks at no more lines than that: h11 makes objects of all, which costs a hundred times as much."""
    lines = data.split(b"\n", HEADERS + 2)
    return len(lines) > HEADERS + 2 and not any(line in (b"", b"\r") for line in lines[1 : HEADERS + 2])


class LimitedReceiveBuffer(ReceiveBuffer):
    """h11's receive buffer. Raises RefusedError for a head, or trailers, of too many lines or bytes before h11 parses them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most  # bytes

    def maybe_extract_lines(self) -> list[bytearray] | None:
        if has_many_lines(self._data):
            raise RefusedError(f"a request may have {HEADERS} headers; send fewer", error_status_hint=431)
        lines = super().maybe_extract_lines()
        if lines is not None and sum(map(len, lines)) > self._most:
            raise RefusedError(f"the head has more than {self._most} bytes; send less", error_status_hint=431)
        return lines


class LimitedParser(h11.Connection):
    """h11's connection with limits.

    Bodies in tiny chunks are refused: each chunk costs as much as a line of the head. An error of the request is kept in
    `problem`, because uvicorn would log it without the client's address. `chunked`: the current answer is sent in chunks. An
    answer that begins before the request is complete closes the connection.
    """

    chunked = False
    _chunks = _bytes = 0  # received of the current body
    problem: h11.RemoteProtocolError | None = None

    def __init__(self, most: int) -> None:
        super().__init__(h11.SERVER, most)
        self._receive_buffer = LimitedReceiveBuffer(most)

    def next_event(self) -> Any:
        if self.problem is not None:
            return h11.NEED_DATA
        try:
            event = super().next_event()
            self._count(event)
        except h11.RemoteProtocolError as error:
            self.problem = error
            return h11.NEED_DATA
        return event

    def _count(self, event: Any) -> None:
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_end
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS + self._bytes // MEAN_CHUNK:
                raise RefusedError(f"the chunks of the body are smaller than {MEAN_CHUNK} bytes; send larger ones")

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
    """One client's connection, with time limits that uvicorn does not have. Owned by the event loop.

    The connection closes if the head of a request is not complete within `head_seconds` of its first byte (of connecting, for
    the first request), or if the client does not read for `send_seconds`. A client that is refused while it sends would lose
    the answer if the connection closed at once: the server reads and drops the rest for `body_seconds`, at most MOST_DROPPED
    bytes.
    """

    head_seconds = 10.0
    send_seconds = 60.0
    body_seconds = 30.0
    writes = WriteBatch()
    table = ConnectionTable(1 << 20, 1 << 20)
    proxies = Proxies()
    pace = Pace()
    invalid = BurstLog(log, logging.WARNING, "requests that are not valid HTTP")
    refuse: Refuse = staticmethod(lambda data, peer, default_headers: None)
    address = ""
    principal = ""  # name of the owner of its last valid key
    _parses = False  # has a parser
    _dropped: int | None = None  # bytes dropped after a refusal; None: no refusal
    _read_timer: asyncio.TimerHandle | None = None  # closes the connection if the client does not send in time
    _write_timer: asyncio.TimerHandle | None = None  # closes it if the client does not read in time

    def __init__(self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        # `_parse` makes the parser, with the first bytes that `refuse` does not answer.
        self.config, self.server_state, self.app_state = config, server_state, app_state
        self.loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.client = get_remote_addr(transport)
        peer = self.client[0] if self.client else ""
        self.address = client_group(peer)
        self.server_state.connections.add(self)
        self.table.add(self, limited=not self.proxies.trust(peer))
        self._start_timer()

    def _parse(self) -> None:
        """Make the parser and the objects of uvicorn's protocol."""
        self._parses = True
        transport, state = self.transport, {**self.app_state, CHUNK: self.chunk, ADMIT: self.admit}
        super().__init__(self.config, self.server_state, state)
        self.conn: LimitedParser = LimitedParser(self.config.h11_max_incomplete_event_size or HEAD)
        super().connection_made(BatchedTransport(transport, self.writes, self._linger))  # type: ignore[arg-type]

    def admit(self, principal: str) -> None:
        """Mark the connection as admitted: its current request passed the guard, with a key of `principal`."""
        self.principal = principal
        self.table.admit(self)

    def abort(self) -> None:
        self.transport.abort()

    def chunk(self, data: bytes) -> bool:
        """Send a part of a streamed answer as one chunk, without h11 and uvicorn. Returns False, and sends nothing, if the
        answer is not chunked or the client reads too slowly."""
        if not self.conn.chunked or self.flow.write_paused:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def data_received(self, data: bytes) -> None:
        if self._dropped is not None:
            self._dropped += len(data)
            if self._dropped > MOST_DROPPED:
                self.transport.close()
            return
        if not self._parses:
            if self.transport.is_closing():
                return
            peer = self.client[0] if self.client else ""
            if (refusal := self.refuse(data, peer, self.server_state.default_headers)) is not None:
                self._answer_refused(functools.partial(self._write_last, refusal))
                return
            self._parse()
        super().data_received(data)
        if self._dropped is not None:
            return
        if self.conn.their_state is h11.IDLE:  # a part of a head, or nothing
            self._start_timer()
        else:
            self._stop_timer()
            if self.cycle is not None and not self.transport.is_closing():
                self.table.mark_busy(self)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.problem is not None and self._dropped is None and not self.transport.is_closing():
            # h11 appends the bytes of the request, which may hold a key.
            reason, *_ = str(self.conn.problem).partition(":")
            self.invalid.add(self.client[0] if self.client else "", reason)
            self._answer_refused(functools.partial(self._refuse, self.conn.problem))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self.table.mark_idle(self)
        if self.conn.trailing_data[0] and self.conn.their_state is h11.IDLE:
            self._start_timer()

    def _answer_refused(self, answer: Callable[[], None]) -> None:
        """Drop what the client sends from now on, and call `answer`, which also closes, at the pace of refusals."""
        self._dropped = 0
        self._stop_timer()
        self.pace.answer(self.principal, answer)

    def _write_last(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)
            self.transport.close()

    def _refuse(self, problem: h11.RemoteProtocolError) -> None:
        """Answer an invalid request, if its answer has not begun, and close the connection."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            message = str(problem) if isinstance(problem, RefusedError) else INVALID
            error = ApiError(problem.error_status_hint, message, code="invalid_http")
            headers = [(b"content-type", b"application/json")]
            if self.conn.their_state is not h11.SEND_BODY:
                headers.append((b"connection", b"close"))
            response = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
            for event in (response, h11.Data(data=error.body()), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: uvicorn would advise to install packages for each such request. The guard refuses WebSockets."""

    def pause_writing(self) -> None:
        if self._parses:
            super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._parses:
            super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.remove(self)
        self._stop_timer()
        self._stop_write_timer()
        if self._parses:
            super().connection_lost(exc)
        else:
            self.server_state.connections.discard(self)

    def shutdown(self) -> None:
        if self._parses:
            super().shutdown()
        else:
            self.transport.close()

    def _linger(self) -> bool:
        """Decide whether the connection stays open to read and drop the rest of a request; nothing more is written."""
        if self.conn.their_state not in (h11.SEND_BODY, h11.ERROR):
            return False
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:  # the client has closed the connection
            return False
        self._dropped = 0
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self._stop_timer()
        self._read_timer = self.loop.call_later(self.body_seconds, self.transport.close)
        self.table.mark_idle(self)
        return True

    def _start_timer(self) -> None:
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(self.head_seconds, self._close)

    def _stop_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def make_protocol(
    table: ConnectionTable | None = None,
    proxies: Proxies | None = None,
    refuse: Refuse | None = None,
    pace: Pace | None = None,
    **seconds: float,
) -> Callable[..., Any]:
    """Return the protocol class of one server. `refuse`: Guard.refuse_early. `pace`: Guard.pace. `seconds`: head_seconds,
    send_seconds and body_seconds of Connection."""
    own: dict[str, Any] = {
        "table": table or ConnectionTable(1 << 20, 1 << 20),
        "proxies": proxies or Proxies(),
        "pace": pace or Pace(),
        "writes": WriteBatch(),
        "invalid": BurstLog(log, logging.WARNING, "requests that are not valid HTTP"),
    }
    if refuse is not None:
        own["refuse"] = staticmethod(refuse)
    return type("Connection", (Connection,), {**seconds, **own})
