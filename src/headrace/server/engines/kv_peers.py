"""K/V between replicas: an engine lends blocks of its prefix cache to others and fetches theirs, over authenticated links.

A link serves one fetch. The replica that fetches sends Find, with the hashes of the blocks. The other one answers Found, with
the number of leading segments that it has and holds, or Declined. Each Read is answered by a frame with a segment, as in a file
of the K/V store (`kv.segments`): header with checksums, data. The blocks are held until the link ends, `HOLD_SECONDS` at most.

Both ends must have the same digest of bits. All of this runs in a thread of its own: the engine's thread only holds and drops
blocks, and copies segments that have arrived into its pools. Whatever fails, the request computes.

Source: Qin et al., "Mooncake", arXiv 2407.00079 (prefix caches of other nodes).
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from hashlib import sha256

import msgspec
import numpy as np

from headrace.kv.lender import Loan
from headrace.kv.segments import SEGMENT_BLOCKS, DamagedSegmentError, check_segment, header_size, segment_header
from headrace.kv.store import KVStore, Load
from headrace.llm import LLM
from headrace.parallel.hosts.address import Address
from headrace.parallel.hosts.link import Link, LinkError, Listener
from headrace.server.engines.messages import PeerLink, PeerStats
from headrace.startup.kv_store import check_prefix_sharing

log = logging.getLogger("headrace.engine")

FIND_SECONDS = 5.0  # until a peer has found blocks: it does so between two steps
READ_SECONDS = 5.0  # until a segment has arrived
HOLD_SECONDS = 60.0  # for one fetch, at the replica that lends
PAUSE_SECONDS = 10.0  # after a fault of a peer, until the next fetch from it
AHEAD = 4  # segments of a fetch that have arrived, or were asked for, and are not in the pools yet
MOST_FIND = 4 << 20  # bytes of a Find: 100,000 hashes
MOST_REPLY = 4096  # bytes of Found and Declined


class Find(msgspec.Struct, tag=True):
    """To the replica that lends: the hashes of blocks, in order, whose KV groups (bit mask) are needed."""

    bits: str
    hashes: list[bytes]
    groups: int


class Read(msgspec.Struct, tag=True):
    """To the replica that lends: send this segment, counted from 0."""

    number: int


class Found(msgspec.Struct, tag=True):
    """From the replica that lends: the number of leading segments that it holds."""

    segments: int


class Declined(msgspec.Struct, tag=True):
    """From the replica that lends: why it lends nothing."""

    reason: str


class PeerFaultError(Exception):
    """A peer does not follow the protocol. One line."""


_asked = msgspec.msgpack.Decoder(Find | Read)
_reply = msgspec.msgpack.Decoder(Found | Declined)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class PeerCounts:
    """Counts since the port was opened, as of PeerStats."""

    fetched: int = 0
    failed: int = 0
    lent: int = 0
    bytes_fetched: int = 0
    bytes_lent: int = 0

    def stats(self) -> PeerStats:
        return PeerStats(**asdict(self))


class PeerPort:
    """The fetches of one engine, and the listening socket for those of others. `bell` becomes readable when the engine has
    blocks to hold or to drop.

    bits: digest of all that decides K/V and their layout.
    """

    def __init__(self, link: PeerLink, store: KVStore, bits: str) -> None:
        self.address = Address(link.host, link.port)
        self.counts = PeerCounts()
        self.bell, self._ring = os.pipe()
        os.set_blocking(self._ring, False)
        self._key, self._store, self._bits = link.key, store, bits
        self._paused: dict[str, float] = {}  # until when nothing is fetched from an address
        self._loop = asyncio.new_event_loop()
        self._landed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = Listener(link.key, self._lend, lambda peer, why: log.warning("kv peers: refused %s: %s", peer, why))
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv peers", daemon=True)

    def listen(self) -> None:
        """Listen. Raises ValueError if that cannot be done."""
        self._thread.start()
        try:
            self.address = asyncio.run_coroutine_threadsafe(self._listener.start(self.address), self._loop).result()
        except ValueError as error:
            self.close()
            raise ValueError(f"kv_peers: {str(error).replace('--listen', '--kv-peer-port')}") from None
        self._store.peers, self._store.lender.wake = self, self._wake

    def close(self) -> None:
        """End the thread. Loads without a result get None."""
        if self._loop.is_closed():
            return
        self._store.lender.wake = lambda: None
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for file in (self.bell, self._ring):
            os.close(file)

    async def _end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._listener.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.write(self._ring, b"\0")

    # -- fetching ------------------------------------------------------------------------------------------------------
    def fetch(self, address: str, loads: list[Load], groups: int) -> None:
        """Set the result of each load, in order. Returns at once."""
        self._loop.call_soon_threadsafe(self._begin, address, loads, groups)

    def changed(self) -> None:
        """The engine has taken a load."""
        self._loop.call_soon_threadsafe(self._landed.set)

    def _begin(self, address: str, loads: list[Load], groups: int) -> None:
        task = self._loop.create_task(self._fetch(address, loads, groups))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(self, address: str, loads: list[Load], groups: int) -> None:
        try:
            if address != str(self.address) and time.monotonic() >= self._paused.get(address, 0.0):
                await self._transfer(address, loads, groups)
        except (LinkError, DamagedSegmentError, PeerFaultError, ValueError) as error:
            self.counts.failed += 1
            self._paused[address] = time.monotonic() + PAUSE_SECONDS
            log.warning("kv peers: %s %s; computing instead", address, error)
        finally:
            for load in loads:
                if not load.result.done():
                    load.result.set_result(None)
            self._store.notify()

    async def _transfer(self, address: str, loads: list[Load], groups: int) -> None:
        """Fetch the leading segments that the peer has. Raises LinkError, DamagedSegmentError, PeerFaultError, ValueError."""
        sizes = self._store.memory.sizes(groups)
        head = header_size(sizes)
        link = await Link.connect(Address.parse(address), self._key)
        try:
            link.send(_encode(Find(self._bits, [key for load in loads for key in load.hashes], groups)))
            found = await _found(link, len(loads))
            sent = 0
            for number, load in enumerate(loads[:found]):
                # One must be under way; more as the engine takes the earlier ones.
                while sent <= number or (sent < found and sent < _landed(loads) + AHEAD):
                    await self._wait_for_room(loads, sent)
                    link.send(_encode(Read(sent)))
                    sent += 1
                frame = await _within(READ_SECONDS, link.receive(head + SEGMENT_BLOCKS * sum(sizes)), "segment")
                data = np.frombuffer(frame, np.uint8)[head:]
                check_segment(frame[:head], data, load.hashes[-1], groups, sizes)
                self.counts.fetched += 1
                self.counts.bytes_fetched += len(frame)
                load.result.set_result((groups, data))
                self._store.notify()
        finally:
            link.close()

    async def _wait_for_room(self, loads: list[Load], sent: int) -> None:
        """Wait until the engine has taken all but AHEAD of the first `sent` loads."""
        while sent >= _landed(loads) + AHEAD:
            self._landed.clear()
            if sent >= _landed(loads) + AHEAD:
                await self._landed.wait()

    # -- lending -------------------------------------------------------------------------------------------------------
    async def _lend(self, link: Link) -> None:
        """Serve one fetch of another replica."""
        try:
            async with asyncio.timeout(HOLD_SECONDS):
                find = _asked.decode(await link.receive(MOST_FIND))
                if not isinstance(find, Find):
                    raise PeerFaultError("sent no Find first")
                if reason := self._declines(find):
                    log.warning("kv peers: lend nothing to %s: its engine %s", link.peer, reason)
                    link.send(_encode(Declined(f"lends nothing: this engine {reason}")))
                    await link.flush()
                    return
                lent = self._store.lender.lend(find.hashes, find.groups)
                try:
                    await self._send(link, await asyncio.wrap_future(lent), find.hashes)
                finally:
                    _return(self._store, lent)
        except (LinkError, TimeoutError) as error:  # most fetches end with their link
            log.debug("kv peers: %s %s", link.peer, error)
        except (PeerFaultError, msgspec.MsgspecError) as error:
            log.warning("kv peers: %s %s", link.peer, error)

    def _declines(self, find: Find) -> str:
        """Why nothing is lent to the sender of a Find; empty if something may be."""
        if find.bits != self._bits:
            return "has another version, other files of the model, or other settings"
        if find.groups <= 0 or find.groups & ~self._store.memory.groups:
            return "needs K/V that are not lent"
        return ""

    async def _send(self, link: Link, loan: Loan, hashes: list[bytes]) -> None:
        """Send the segments of a loan as they are read. Raises LinkError, PeerFaultError, MsgspecError."""
        memory, size = self._store.memory, SEGMENT_BLOCKS
        sizes, count = memory.sizes(loan.groups), len(loan.blocks) // size
        link.send(_encode(Found(count)))
        while True:
            read = _asked.decode(await link.receive(MOST_REPLY))
            if not isinstance(read, Read) or not 0 <= read.number < count:
                raise PeerFaultError(f"asked for a segment that is none of the {count} found")
            start = read.number * size
            data = memory.read(loan.groups, loan.blocks[start : start + size])
            frame = segment_header(hashes[start + size - 1], loan.groups, data, sizes) + data.tobytes()
            # Counted first: the peer may be done with it before this task goes on.
            self.counts.lent += 1
            self.counts.bytes_lent += len(frame)
            link.send(frame)
            await link.drain()


def open_peer_port(link: PeerLink, llm: LLM, bits: str) -> PeerPort | None:
    """The port of an engine; None for a model without a prefix cache of its own. bits: of its outputs; empty if they are not
    exact. Raises ValueError, one line."""
    if llm.model_config.encoder or llm.model_config.source is not None:
        log.info("kv peers: %s keeps no K/V between requests", llm.opened.name)
        return None
    check_prefix_sharing("kv_peers", llm.settings, llm.model_config)
    if not bits:
        raise ValueError("kv_peers needs the native back end, whose replicas have equal bits; leave it out")
    engine = llm.engine
    if (store := engine.scheduler.store) is None:
        store = engine.scheduler.store = KVStore(None, engine.blocks, llm.runner.block_memory(engine.blocks.groups))
    layout = repr([engine.blocks.block_size, SEGMENT_BLOCKS, engine.blocks.groups])
    port = PeerPort(link, store, sha256(f"{bits} {layout}".encode()).hexdigest())
    port.listen()
    return port


async def _found(link: Link, most: int) -> int:
    """The number of segments that a peer has found. Raises LinkError, PeerFaultError."""
    reply = await _within(FIND_SECONDS, link.receive(MOST_REPLY), "answer")
    try:
        message = _reply.decode(reply)
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerFaultError(f"sent an invalid message ({error})") from None
    if isinstance(message, Declined):
        raise PeerFaultError(message.reason)
    if not 0 <= message.segments <= most:
        raise PeerFaultError(f"found {message.segments} of {most} segments")
    return message.segments


async def _within(seconds: float, receive: Awaitable[bytes], what: str) -> bytes:
    """Await a frame. Raises LinkError, PeerFaultError if there is none in time."""
    try:
        async with asyncio.timeout(seconds):
            return await receive
    except TimeoutError:
        raise PeerFaultError(f"sent no {what} within {seconds:g} s") from None


def _landed(loads: list[Load]) -> int:
    return sum(load.landed for load in loads)


def _return(store: KVStore, lent: "Future[Loan]") -> None:
    """Return a loan, also one that the engine has not made yet."""
    if not lent.cancel():
        lent.add_done_callback(lambda done: store.lender.give_back(done.result()))
