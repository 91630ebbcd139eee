"""Stages of a pipeline on other hosts: messages of a link, and how both of its ends pass them on.

The leader's host runs a relay for each such stage, the stage's host runs `headrace rank`. To the engine and to the stages next
to it a relay looks like a stage's process; to the stage's process `headrace rank` looks like the engine.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from headrace.parallel.hosts.link import Link, LinkError
from headrace.parallel.pipeline.link import LENGTH, MOST, Ready, RowSlots, Start

T = TypeVar("T")


class Begin(msgspec.Struct, tag=True):
    """To `headrace rank`, the first message: what to load. width: hidden size. version, files: must be equal on both hosts."""

    version: str
    files: str
    start: Start
    width: int


class Refused(msgspec.Struct, tag=True):
    """From `headrace rank`, its last message: why it does not run the stage."""

    reason: str


class Control(msgspec.Struct, tag=True):
    """A message of the stage's control socket, encoded: a plan to it, or StageLoaded from it."""

    data: bytes


class Rows(msgspec.Struct, tag=True):
    """The end of a step, with its hidden rows as float32 bytes."""

    ready: Ready
    data: bytes


Message = Begin | Refused | Control | Rows
_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Encode a message of a link."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Decode a message of a link. Raises LinkError."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise LinkError(f"sent an invalid message ({error})") from None


class Pipe:
    """A local socket of a stage. Its frames are those of `pipeline.link`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, sock: socket.socket) -> "Pipe":
        return cls(*await asyncio.open_connection(sock=sock))

    async def receive(self) -> bytes:
        """The next message, encoded. Raises EOFError, LinkError."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            if length > MOST:
                raise LinkError(f"announced a message of {length:,} bytes")
            return await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            raise EOFError from None

    def send(self, data: bytes) -> None:
        self._writer.write(LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()


class RowPipe:
    """Hidden rows to or from a local stage: a socket, and the memory in which they are."""

    def __init__(self, pipe: Pipe, slots: RowSlots, width: int) -> None:
        self._pipe, self._slots, self._width = pipe, slots, width

    async def receive(self) -> Rows:
        """The rows of the next step. Raises EOFError, LinkError."""
        ready = msgspec.msgpack.decode(await self._pipe.receive(), type=Ready)
        return Rows(ready, self._slots.of(ready.step, ready.rows).tobytes())

    def send(self, message: Rows) -> None:
        """Write rows into their slot and announce them. Raises LinkError for a message whose size is wrong."""
        if len(message.data) != 4 * self._width * message.ready.rows:
            raise LinkError(f"sent {len(message.data):,} bytes for {message.ready.rows:,} rows of {self._width:,} numbers")
        try:
            rows = self._slots.of(message.ready.step, message.ready.rows)
        except ValueError as error:
            raise LinkError(f"sent {error}") from None
        rows.reshape(-1).view("u1")[:] = memoryview(message.data)
        message.ready.times = on_this_clock(message.ready.times)
        self._pipe.send(_encoder.encode(message.ready))


def on_this_clock(times: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Times of another host's clock, moved so that the last one is now."""
    if not times:
        return []
    offset = time.monotonic() - times[-1][1]
    return [(begin + offset, end + offset) for begin, end in times]


async def exchange(link: Link, control: Pipe, rows_from: RowPipe | None, rows_to: RowPipe | None) -> None:
    """Pass on messages until one end closes. rows_from: local rows for the other host; rows_to: receives its rows.

    Raises EOFError if a local end closes, LinkError if the link ends.
    """

    async def send_control() -> None:
        while True:
            link.send(encode(Control(await control.receive())))

    async def send_rows(pipe: RowPipe) -> None:
        while True:
            link.send(encode(await pipe.receive()))

    async def receive() -> None:
        while True:
            message = decode(await link.receive())
            if isinstance(message, Control):
                control.send(message.data)
            elif isinstance(message, Rows) and rows_to is not None:
                rows_to.send(message)
            elif isinstance(message, Refused):
                raise LinkError(message.reason)
            else:
                raise LinkError(f"sent {type(message).__name__} at the wrong time")

    await first_error(send_control(), receive(), *([] if rows_from is None else [send_rows(rows_from)]))


async def first_error(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until one raises, end the others, and raise that error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def row_memory(start: Start, width: int) -> tuple[int, RowSlots]:
    """New memory for the rows between a stage and this process: its descriptor, and the slots."""
    descriptor = RowSlots.create(start.depth, start.slot, width)
    return descriptor, RowSlots(descriptor, start.depth, start.slot, width)
