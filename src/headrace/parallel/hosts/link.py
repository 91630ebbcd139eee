"""Authenticated connections between processes of different hosts.

Both ends have the same key. Each end sends a random challenge and proves with HMAC-SHA256 that it has the key. Every later
frame carries an authentication code under a key of its own for the connection and the direction, with the number of the frame.
Only an end with the key can send, change, repeat, reorder or omit frames. Frames are not encrypted.

A hello is the protocol's name and a challenge. A frame is the length of its data (4 bytes, little-endian), the code, and the
data. Frames without data are heartbeats.
"""

import asyncio
import contextlib
import errno
import hmac
import os
import secrets
import struct
from collections.abc import Awaitable, Callable

from headrace.parallel.hosts.address import Address

PROTOCOL = b"headrace-link-01"
CHALLENGE = 32  # bytes
HELLO = len(PROTOCOL) + CHALLENGE
PROOF = 32  # bytes
LENGTH = struct.Struct("<I")
NUMBER = struct.Struct("<QI")
CODE = 16  # bytes of a frame's authentication code
MOST_FRAME = 256 << 20  # bytes of data
BEAT = 0.5  # seconds between heartbeats
GONE_AFTER = 2.0  # seconds without a byte after which the other end counts as gone
ANSWERS_WITHIN = 5.0  # seconds for a connection and its proofs
MOST_UNPROVED = 32  # connections that have not proved that they have the key


class LinkError(Exception):
    """The other end cannot be reached, is gone, or sent an invalid frame. One line."""


class WrongKeyError(LinkError):
    """The other end has another key."""


class FrameCodes:
    """Authentication codes of the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def next(self, data: bytes) -> bytes:
        """The code of the next frame."""
        code = hmac.digest(self._key, NUMBER.pack(self._number, len(data)) + data, "sha256")[:CODE]
        self._number += 1
        return code


class Keys:
    """What follows from the key and both hellos of a connection: the proof of each end, and the keys of both directions."""

    def __init__(self, key: bytes, connecting: bytes, listening: bytes) -> None:
        self._key, self._hellos = key, connecting + listening

    def _derive(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, purpose + self._hellos, "sha256")

    @property
    def listening_proof(self) -> bytes:
        return self._derive(b"proof of the listening end")

    @property
    def connecting_proof(self) -> bytes:
        return self._derive(b"proof of the connecting end")

    def codes(self, listening: bool) -> tuple[FrameCodes, FrameCodes]:
        """Codes of the frames that an end sends, and of those that it receives."""
        ours, theirs = FrameCodes(self._derive(b"to connecting")), FrameCodes(self._derive(b"to listening"))
        return (ours, theirs) if listening else (theirs, ours)


def reason(error: OSError) -> str:
    """The system's text of an error; asyncio's own texts name its functions."""
    return os.strerror(error.errno or 0) if error.errno in errno.errorcode else str(error.strerror or error)


def hello() -> bytes:
    """The first bytes of an end."""
    return PROTOCOL + secrets.token_bytes(CHALLENGE)


class Link:
    """One end of an authenticated connection. `connect` makes the connecting end, `Listener` the other one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._sent = self._received = FrameCodes(b"")
        self._beating: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, address: Address, key: bytes) -> "Link":
        """Connect to a listening process. Raises LinkError, WrongKeyError."""
        try:
            async with asyncio.timeout(ANSWERS_WITHIN):
                link = cls(*await asyncio.open_connection(address.host, address.port))
                try:
                    await link._prove(key)
                except BaseException:
                    link.close()
                    raise
        except TimeoutError:
            raise LinkError(f"does not answer within {ANSWERS_WITHIN:g} s") from None
        except OSError as error:
            raise LinkError(f"cannot be reached ({reason(error)})") from None
        return link

    @classmethod
    async def accept(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> "Link":
        """Make the listening end of a new connection. Raises LinkError, WrongKeyError."""
        link = cls(reader, writer)
        try:
            async with asyncio.timeout(ANSWERS_WITHIN):
                await link._demand(key)
        except TimeoutError:
            link.close()
            raise LinkError(f"has not proved within {ANSWERS_WITHIN:g} s that it has the key") from None
        except BaseException:
            link.close()
            raise
        return link

    async def _prove(self, key: bytes) -> None:
        ours = hello()
        self._writer.write(ours)
        keys = Keys(key, ours, await self._hello())
        if not hmac.compare_digest(await self._exactly(PROOF), keys.listening_proof):
            raise WrongKeyError("has another key; give both ends the same key file")
        self._writer.write(keys.connecting_proof)
        self._begin(*keys.codes(listening=False))

    async def _demand(self, key: bytes) -> None:
        theirs, ours = await self._hello(), hello()
        keys = Keys(key, theirs, ours)
        self._writer.write(ours + keys.listening_proof)
        try:
            proof = await self._exactly(PROOF)
        except LinkError:
            raise LinkError("did not prove that it has the key") from None
        if not hmac.compare_digest(proof, keys.connecting_proof):
            raise WrongKeyError("has another key; give both ends the same key file")
        self._begin(*keys.codes(listening=True))

    async def _hello(self) -> bytes:
        theirs = await self._exactly(HELLO)
        if not theirs.startswith(PROTOCOL):
            raise LinkError("is not a Headrace process, or one of another version")
        return theirs

    def _begin(self, sent: FrameCodes, received: FrameCodes) -> None:
        self._sent, self._received = sent, received
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            self.send(b"")

    def send(self, data: bytes) -> None:
        """Queue a frame. It is lost if the other end is gone; `receive` then raises."""
        if not self._writer.is_closing():
            self._writer.write(LENGTH.pack(len(data)) + self._sent.next(data) + data)

    async def receive(self, most: int = MOST_FRAME) -> bytes:
        """The data of the next frame that is not a heartbeat. most: its bytes at most. Raises LinkError."""
        while True:
            head = await self._exactly(LENGTH.size + CODE)
            (length,) = LENGTH.unpack_from(head)
            if length > most:
                raise LinkError(f"announced a frame of {length:,} bytes; {most:,} is the most")
            data = await self._exactly(length)
            if not hmac.compare_digest(head[LENGTH.size :], self._received.next(data)):
                raise LinkError("sent a frame whose authentication code is wrong")
            if data:
                return data

    async def _exactly(self, count: int) -> bytes:
        """Read bytes, of which some must arrive every GONE_AFTER seconds. Raises LinkError."""
        parts: list[bytes] = []
        while count:
            try:
                async with asyncio.timeout(GONE_AFTER):
                    part = await self._reader.read(count)
            except TimeoutError:
                raise LinkError(f"gave no sign of life for {GONE_AFTER:g} s") from None
            except OSError as error:
                raise LinkError(f"lost the connection ({reason(error)})") from None
            if not part:
                raise LinkError("closed the connection")
            parts.append(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def drain(self) -> None:
        """Wait until the system has taken most of the frames. Raises LinkError if it takes none for GONE_AFTER seconds."""
        try:
            async with asyncio.timeout(GONE_AFTER):
                await self._writer.drain()
        except TimeoutError:
            raise LinkError(f"took no data for {GONE_AFTER:g} s") from None
        except OSError as error:
            raise LinkError(f"lost the connection ({reason(error)})") from None

    async def flush(self) -> None:
        """Wait until the system has taken all frames, for GONE_AFTER seconds at most."""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(GONE_AFTER):
                await self._writer.drain()

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        if self._beating is not None:
            self._beating.cancel()
        with contextlib.suppress(OSError):
            self._writer.close()

    @property
    def peer(self) -> str:
        """Address of the other end, for the log."""
        name = self._writer.get_extra_info("peername") or ("an unknown address", 0)
        return f"{name[0]}:{name[1]}"


class Listener:
    """A listening socket whose connections become links. `take` serves one link; the link is closed when it returns.

    refused: receives the address and the reason of a connection that becomes no link.
    """

    def __init__(
        self, key: bytes, take: Callable[[Link], Awaitable[None]], refused: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        self._key, self._take, self._refused = key, take, refused
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproved = 0

    async def start(self, address: Address) -> Address:
        """Listen; returns the address, with its port if that was 0. Raises ValueError."""
        try:
            self._server = await asyncio.start_server(self._connected, address.host, address.port)
        except OSError as error:
            raise ValueError(f"cannot listen on {address} ({reason(error)}); use another --listen") from None
        return Address(address.host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Close the socket and all links."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        peer = "{}:{}".format(*(writer.get_extra_info("peername") or ("?", 0))[:2])
        # asyncio reports a cancelled task of a connection as an error.
        with contextlib.suppress(asyncio.CancelledError):
            link = await self._link(reader, writer, peer)
            if link is None:
                return
            try:
                await self._take(link)
            finally:
                link.close()

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> Link | None:
        if self._unproved >= MOST_UNPROVED:
            writer.close()
            self._refused(peer, f"{MOST_UNPROVED} connections have not proved yet that they have the key")
            return None
        self._unproved += 1
        try:
            return await Link.accept(reader, writer, self._key)
        except LinkError as error:
            self._refused(peer, str(error))
            return None
        finally:
            self._unproved -= 1
