"""Messages between the stages of a pipeline on one host, and the shared memory in which hidden rows travel."""

import mmap
import os
import socket
import struct
from typing import Any, TypeVar

import msgspec
import numpy as np

from headrace.backends.native.offer import TargetSettings
from headrace.data.plan import StepPlan

LENGTH = struct.Struct("<I")
MOST = 1 << 30  # bytes of a message

T = TypeVar("T")


class Start(msgspec.Struct):
    """The first message to a stage's process: what to load, and its connections. Descriptors are numbers in that process.

    depth: number of stages, and steps under way; slot: rows of one of them. tp: ranks of the stage; patience: seconds without
    progress after which one is lost. number: of the stage; first, last: its layers [first, last).
    source, out: sockets from the stage before (-1: the first stage) and to the stage behind. rows_in, rows_out: descriptors of
    their regions.
    """

    model: str
    settings: TargetSettings
    depth: int
    slot: int
    tp: int
    patience: float
    number: int = 0
    first: int = 0
    last: int = 0
    source: int = -1
    out: int = -1
    rows_in: int = -1
    rows_out: int = -1


class StageLoaded(msgspec.Struct):
    """A stage's answer to Start. error: empty, or why it cannot be loaded. kv_bytes, weight_bytes: of its layers."""

    kv_bytes: int = 0
    weight_bytes: int = 0
    error: str = ""


class Ready(msgspec.Struct):
    """Message to the stage behind at the end of a step: `rows` hidden rows are in the step's slot.

    error: why the step failed; lost: a rank is lost, so later steps fail, too. times: begin and end of the step on each stage
    before, and on this one, in seconds of the host's monotonic clock.
    """

    step: int
    rows: int = 0
    error: str = ""
    lost: bool = False
    times: list[tuple[float, float]] = []


class Closed(Exception):  # noqa: N818 - the end of a connection, not an error
    """The other end of a socket is closed."""


def send(sock: socket.socket, message: Any) -> None:
    """Send a message. Raises OSError."""
    data = msgspec.msgpack.encode(message)
    sock.sendall(LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket, kind: type[T]) -> T:
    """Receive a message. Raises Closed, OSError (TimeoutError after the socket's time limit), msgspec.ValidationError."""
    (length,) = LENGTH.unpack(_exactly(sock, LENGTH.size))
    if length > MOST:
        raise Closed
    return msgspec.msgpack.decode(_exactly(sock, length), type=kind)


def _exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = sock.recv_into(view[got:])
        if not count:
            raise Closed
        got += count
    return data


class RowSlots:
    """Hidden rows [rows, width] float32 of up to `depth` steps, in memory that two processes share.

    The steps under way are at most `depth`, so a slot is free when a step needs it.
    """

    def __init__(self, fd: int, depth: int, rows: int, width: int) -> None:
        """fd: a file of `size(depth, rows, width)` bytes; the caller keeps it."""
        self._memory = mmap.mmap(fd, self.size(depth, rows, width))
        self._slots = np.frombuffer(self._memory, np.float32).reshape(depth, rows, width)

    @staticmethod
    def size(depth: int, rows: int, width: int) -> int:
        return depth * rows * width * 4

    @staticmethod
    def create(depth: int, rows: int, width: int) -> int:
        """A file of that size in memory. Pages take memory when they are first written."""
        fd = os.memfd_create("headrace-rows", os.MFD_CLOEXEC)
        os.ftruncate(fd, RowSlots.size(depth, rows, width))
        return fd

    def of(self, step: int, rows: int) -> np.ndarray:
        """The rows of a step, a view. Raises ValueError if the step has more rows than a slot."""
        slot = self._slots[step % len(self._slots)]
        if rows > len(slot):
            raise ValueError(f"a step of {rows} rows, and a slot has {len(slot)}")
        view: np.ndarray = slot[:rows]
        return view


def without_wants(plan: StepPlan) -> StepPlan:
    """The plan as stages before the last one need it: they compute rows and answer nothing."""
    feeds = [msgspec.structs.replace(feed, wants=(), allowed=b"", q=()) for feed in plan.feeds]
    return msgspec.structs.replace(plan, feeds=feeds)
