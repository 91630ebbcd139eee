"""The K/V store: segments of the prefix cache that are saved to disk and found again after a restart, or come from a peer.

Saving: when a sequence gives up its blocks, the store holds its full segments, and a thread copies them out of the pools and
writes them.

Loading: where the prefix cache in memory ends and the store has the next segment, the request waits. A thread reads and checks
the file. Between two steps the engine copies the blocks into the pools and publishes them, so that the request finds them like
any cached prefix. A segment that cannot be read is computed.

Peers: if the next segment is not on disk and another replica should have it, a thread of `Peers` fetches all segments that the
replica has, and they arrive in the same way. `Lender` holds the blocks that other replicas fetch from this one.

Source: Qin et al., "Mooncake", arXiv 2407.00079 (a prefix cache on disk, by hash chain).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Protocol

import numpy as np

from headrace.data.plan import FEATURES, TARGET, UPPER
from headrace.data.types import Sequence
from headrace.kv.block_memory import BlockMemory
from headrace.kv.blocks import BlockManager
from headrace.kv.lender import HELD_SHARE, Lender
from headrace.kv.segments import SEGMENT_BLOCKS, SegmentCounts, SegmentFolder

log = logging.getLogger("headrace")

# KV groups that the feeds of every request fill, if the engine has them.
ALWAYS = (TARGET.name, FEATURES, UPPER)
# Segments that are read ahead, for all requests together.
MAX_LOADS = 4
# Segments that are copied into the pools between two steps, so that running requests go on.
LOADS_PER_STEP = 2
# Requests do not wait for a disk that takes longer, and compute.
LOAD_SECONDS = 10.0
MAX_SAVES = 64  # chains that wait for the writer; more are not saved
MAX_FETCHES = 4  # prefixes on their way from peers; requests above that compute
WAIT_SECONDS = 0.05


@dataclass(eq=False, slots=True)
class Segment:
    """A segment to save. blocks: held until it is copied."""

    key: bytes
    groups: int
    blocks: list[int]


@dataclass(eq=False, slots=True)
class Chain:
    """The segments of one sequence, for the writer: the keys of all, in order, and those to save."""

    keys: list[bytes]
    segments: list[Segment]


@dataclass(eq=False, slots=True)
class Load:
    """A segment on its way from disk or from a peer.

    hashes: of its blocks. began: time; infinite for a peer, whose fetches have time limits of their own. result: groups and
    data, None if it cannot be used. landed: whether the engine has taken it.
    """

    hashes: list[bytes]
    began: float
    landed: bool = False
    result: "Future[tuple[int, np.ndarray] | None]" = field(default_factory=Future)


class Peers(Protocol):
    """Fetches segments from other replicas, in a thread of its own."""

    def fetch(self, address: str, loads: list[Load], groups: int) -> None:
        """Set the result of each load, in order. Returns at once."""

    def changed(self) -> None:
        """The engine has taken a load."""

    def close(self) -> None:
        """End the thread. Loads without a result get None."""


class KVStore:
    """The store of one engine, whose thread calls all methods but those of the two threads.

    folder: None: nothing is saved to disk or read from it.
    """

    def __init__(self, folder: SegmentFolder | None, blocks: BlockManager, memory: BlockMemory) -> None:
        self.folder = folder
        self.peers: Peers | None = None
        self.lender = Lender(blocks)
        self.blocks = blocks
        self.memory = memory
        # Without these groups no request could use a segment.
        self._needed = sum(1 << g for g, group in enumerate(blocks.groups) if group.name in ALWAYS)
        self._saving: dict[bytes, int] = {}  # groups of the segments that wait for the writer
        self._loads: dict[bytes, Load] = {}
        self._fetches: list[list[Load]] = []
        self._held = 0  # blocks
        self._chains = 0  # that wait for the writer
        self._last = b""  # the last segment of the newest chain
        self._copied: deque[Segment] = deque()  # by the writer: their blocks can be dropped
        self._written: deque[Chain] = deque()
        self._holding: dict[int, Segment] = {}  # by identity
        self._changed = threading.Event()
        self._reader = ThreadPoolExecutor(1, "kv store reader")
        self._writer = ThreadPoolExecutor(1, "kv store writer")

    @property
    def counts(self) -> SegmentCounts:
        """Counts of the folder, which must exist."""
        assert self.folder is not None
        return self.folder.counts

    @property
    def held(self) -> Iterable[int]:
        """The blocks that are held for the writer and for peers."""
        return chain((block for segment in self._holding.values() for block in segment.blocks), self.lender.held)

    # -- between two steps ---------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Before a step is scheduled: drop the blocks that are copied, and put loaded segments into the prefix cache."""
        self.release()
        landed = 0
        for key, load in list(self._loads.items()):
            if load.result.done() and landed < LOADS_PER_STEP:
                del self._loads[key]
                load.landed = True
                if (found := load.result.result()) is not None:
                    landed += 1
                    try:
                        self._land(load, *found)
                    except Exception:
                        log.exception("kv store: a segment was not loaded")
        if self._fetches and self.peers is not None:
            self._fetches = [loads for loads in self._fetches if not loads[-1].landed]
            self.peers.changed()

    def wait(self) -> bool:
        """Wait a moment for the threads, when no request can be fed. Returns False if they have nothing to do."""
        if not self._loads and not self._holding:
            return False
        if not any(load.result.done() for load in self._loads.values()):
            self._changed.wait(WAIT_SECONDS)
        self._changed.clear()
        return True

    def close(self) -> None:
        """Save what is queued and end the threads."""
        if self.peers is not None:
            self.peers.close()
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self.release()

    def release(self) -> None:
        """Drop the blocks that are copied, and hold those that peers fetch."""
        self.lender.serve()
        while self._written:
            for segment in self._written.popleft().segments:
                self._saving.pop(segment.key, None)
            self._chains -= 1
        while self._copied:
            segment = self._copied.popleft()
            del self._holding[id(segment)]
            for block in reversed(segment.blocks):
                self.blocks.pool.drop(block)
            self._held -= len(segment.blocks)

    # -- saving --------------------------------------------------------------------------------------------------------
    def save(self, seq: Sequence) -> None:
        """Queue the full segments of a sequence that is about to give up its blocks. Segments that are on disk already are
        recorded as used."""
        kv, size = seq.kv, SEGMENT_BLOCKS
        count = min(kv.published, len(kv.tables[0])) // size
        if not count or self._chains >= MAX_SAVES or self.folder is None:
            return
        keys: list[bytes] = []
        segments: list[Segment] = []
        for number in range(count):
            blocks = kv.tables[0][number * size : (number + 1) * size]
            groups = self.memory.groups
            for block in blocks:
                groups &= self.blocks.pool.filled[block]
            if groups & self._needed != self._needed:
                break
            key = self.blocks.hash(seq, (number + 1) * size - 1)
            keys.append(key)
            known = self.folder.groups_of(key) | self._saving.get(key, 0)
            if groups & ~known:
                if self._held + size > self.blocks.num_blocks // HELD_SHARE:
                    break
                segments.append(self._hold(Segment(key, groups, blocks)))
        if segments or (keys and keys[-1] != self._last):
            self._last = keys[-1]
            self._chains += 1
            self._writer.submit(self._write, Chain(keys, segments))

    def _hold(self, segment: Segment) -> Segment:
        for block in segment.blocks:
            self.blocks.pool.share(block)
        self._held += len(segment.blocks)
        self._holding[id(segment)] = segment
        self._saving[segment.key] = segment.groups
        return segment

    def _write(self, saved: Chain) -> None:
        """In the writer's thread. The last segment first: a chain without its beginning is of no use, and in memory blocks are
        evicted in the order in which they are dropped."""
        assert self.folder is not None
        remaining = list(saved.segments)
        try:
            while remaining:
                data = self.memory.read(remaining[-1].groups, remaining[-1].blocks)
                segment = remaining.pop()
                self._copied.append(segment)
                self._changed.set()
                self.folder.write(segment.key, segment.groups, data)
            self.folder.touch(saved.keys)
        except Exception:
            log.exception("kv store: segments were not saved")
        finally:
            self._copied.extend(reversed(remaining))
            self._written.append(saved)
            self._changed.set()

    # -- loading -------------------------------------------------------------------------------------------------------
    def loads(self, seq: Sequence, most: int) -> bool:
        """Whether a block-aligned sequence, whose cached prefix in memory has ended, waits for its next segment.

        most: tokens of `seq` that may be shared.
        """
        kv, size = seq.kv, self.blocks.block_size
        index, offset = divmod(kv.computed[0], size)
        number = index // SEGMENT_BLOCKS
        if offset or len(kv.tables[0]) > index or (number + 1) * SEGMENT_BLOCKS * size > len(seq.tokens):
            return False
        if (index + 1) * size > self.blocks.exact(seq, min(len(seq.tokens) - 1, most)):
            return False
        if any(time.monotonic() - load.began > LOAD_SECONDS for load in self._loads.values()):
            return False  # the disk hangs
        key = self._key(seq, number)
        if key in self._loads:
            return True
        # A segment is loaded once for a sequence, so that one that is evicted at once cannot hold it up for ever.
        if number < kv.sought:
            return False
        if not self._on_disk(key, kv.groups):
            return self._fetch(seq, number)
        if self._reading < MAX_LOADS:
            self._start(seq, number)
        return True

    def _start(self, seq: Sequence, number: int) -> None:
        """Start to load a segment and those after it."""
        seq.kv.sought = number + 1
        length, size = len(seq.tokens), self.blocks.block_size * SEGMENT_BLOCKS
        while self._reading < MAX_LOADS and (number + 1) * size <= length:
            key = self._key(seq, number)
            if not self._on_disk(key, seq.kv.groups):
                return
            if key not in self._loads:
                self._loads[key] = load = Load(
                    seq.kv.hashes[number * SEGMENT_BLOCKS : (number + 1) * SEGMENT_BLOCKS], time.monotonic()
                )
                self._reader.submit(self._read, key, load)
            number += 1

    @property
    def _reading(self) -> int:
        """Segments on their way from disk."""
        return sum(load.began < inf for load in self._loads.values())

    def _on_disk(self, key: bytes, groups: int) -> bool:
        return self.folder is not None and self.folder.groups_of(key) & groups == groups

    def _fetch(self, seq: Sequence, number: int) -> bool:
        """Start to fetch a segment and those after it from the peer that should have them. Returns False if there is none."""
        kv, size = seq.kv, self.blocks.block_size * SEGMENT_BLOCKS
        count = min(kv.peer_tokens, len(seq.tokens)) // size
        if self.peers is None or not kv.peer or number >= count or len(self._fetches) >= MAX_FETCHES:
            return False
        kv.sought = count
        loads: list[Load] = []
        for at in range(number, count):
            if (key := self._key(seq, at)) in self._loads:
                break
            self._loads[key] = Load(kv.hashes[at * SEGMENT_BLOCKS : (at + 1) * SEGMENT_BLOCKS], inf)
            loads.append(self._loads[key])
        self._fetches.append(loads)
        self.peers.fetch(kv.peer, loads, kv.groups)
        return True

    def notify(self) -> None:
        """Wake the engine if it waits in `wait`; for the threads."""
        self._changed.set()

    def _key(self, seq: Sequence, number: int) -> bytes:
        return self.blocks.hash(seq, (number + 1) * SEGMENT_BLOCKS - 1)

    def _read(self, key: bytes, load: Load) -> None:
        """In the reader's thread."""
        assert self.folder is not None
        try:
            load.result.set_result(self.folder.read(key))
        except BaseException:
            load.result.set_result(None)
            raise
        finally:
            self._changed.set()

    def _land(self, load: Load, groups: int, data: np.ndarray) -> None:
        """Copy the blocks that are missing in memory into the pools, and publish them."""
        pool = self.blocks.pool
        missing = [pool.find(key, groups) is None for key in load.hashes]
        if not any(missing) or sum(missing) > pool.available:
            return
        blocks = [pool.take() if absent else None for absent in missing]
        try:
            self.memory.write(groups, blocks, data)
            for block, key in zip(blocks, load.hashes, strict=True):
                if block is not None:
                    pool.filled[block] = groups
                    pool.publish(block, key)
        finally:
            for block in reversed(blocks):
                if block is not None:
                    pool.drop(block)
