"""Host side of the paged KV cache: which block holds which tokens, who shares it, and what may be reused.

Paging and copy-on-write follow PagedAttention (Kwon et al., SOSP'23); a full block is known by the SHA-256 chain over the
tokens up to its end, rooted in `Holding.root`, so two sequences with one prefix find the same blocks.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from hashlib import sha256

import numpy as np

from headrace.data.config import CacheConfig
from headrace.data.plan import TARGET, KVGroup
from headrace.data.types import Sequence

Span = tuple[Sequence, int, int]  # a sequence and the token range [start, end) about to be written


class BlockManager:
    """Owns block ids, reference counts and, per block, which KV groups are filled.

    Blocks given up between `begin` and `end` (while a step is being scheduled) are reused from the next step on, because
    the copies of one plan run in no particular order.
    """

    def __init__(self, config: CacheConfig, groups: tuple[KVGroup, ...] = (TARGET,)) -> None:
        self.num_blocks = config.num_blocks
        self.block_size = config.block_size
        self.groups = groups
        self._keeps = config.prefix_caching  # what nobody holds any more
        self._refs = [0] * config.num_blocks
        self._hash: list[bytes | None] = [None] * config.num_blocks
        self._filled = [0] * config.num_blocks  # bit g: group g's K/V is in the block
        self._cached: dict[bytes, int] = {}  # published hash -> block
        self._free: deque[int] = deque(range(config.num_blocks))
        self._lru: OrderedDict[int, None] = OrderedDict()  # published blocks nobody holds, oldest first
        self._freed: dict[int, None] = {}  # given up during this scheduling: reusable from the next step
        self._scheduling = False

    # -- one scheduling pass -------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """A step is being scheduled: what earlier steps gave up becomes usable."""
        self._scheduling = False
        for block in self._freed:
            self._retire(block)
        self._freed = {}
        self._scheduling = True

    def end(self) -> None:
        self._scheduling = False

    @property
    def available(self) -> int:
        """Blocks that can be handed out now (published ones nobody holds are evicted when needed)."""
        return len(self._free) + len(self._lru)

    @property
    def freed_this_step(self) -> int:
        """Blocks given up during this scheduling: available at the next step."""
        return len(self._freed)

    @property
    def used(self) -> int:
        return self.num_blocks - self.available - self.freed_this_step

    # -- growing, sharing, giving up -----------------------------------------------------------------------------------
    def writable(self, seq: Sequence, position: int) -> bool:
        """Whether `grow` would have nothing to do for one position: its block is there, and the sequence's alone."""
        table, index = seq.kv.tables[0], position // self.block_size
        return index < len(table) and self._refs[table[index]] == 1 and self._hash[table[index]] is None

    def need(self, spans: Iterable[Span]) -> int:
        """Blocks that `grow` over all these spans would take, copy-on-write included; exact when spans share blocks."""
        total = 0
        dropped: dict[int, int] = {}
        for seq, start, end in spans:
            table = seq.kv.tables[0]
            total += max(0, self._count(end) - len(table))
            for index in self._written(seq, start, end):
                block = table[index]
                if self._refs[block] - dropped.get(block, 0) > 1:
                    total += 1
                    dropped[block] = dropped.get(block, 0) + 1
        return total

    def grow(self, seq: Sequence, start: int, end: int) -> list[tuple[int, int, int]]:
        """Make positions [start, end) writable by `seq` alone; returns the copies (table, from, to) this takes.

        The caller has checked `need`. A shared block in the range is copied, a published one is withdrawn from the cache.
        """
        kv = seq.kv
        table = kv.tables[0]
        copies = []
        for index in self._written(seq, start, end):
            block = table[index]
            if self._refs[block] > 1:
                table[index] = self._take()
                copies.append((0, block, table[index]))
                self._unref(block)
                seq.wire.synced[0] = min(seq.wire.synced[0], index)
                kv.published = min(kv.published, index)
            elif self._hash[block] is not None:
                self._withdraw(block)
                kv.published = min(kv.published, index)
        while len(table) < self._count(end):
            table.append(self._take())
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` shares every block of `parent`; the first to write a shared block copies it."""
        child.kv = parent.kv.fork()
        for block in child.kv.tables[0]:
            self._refs[block] += 1

    def truncate(self, seq: Sequence, length: int) -> None:
        """Give up the blocks beyond `length` tokens: what a rejected draft had."""
        kv = seq.kv
        table = kv.tables[0]
        keep = self._count(length)
        for block in reversed(table[keep:]):
            self._unref(block)
        del table[keep:]
        seq.wire.synced[0] = min(seq.wire.synced[0], keep)
        kv.published = min(kv.published, length // self.block_size)

    def release(self, seq: Sequence) -> None:
        """Give up every block of `seq`; what was published stays findable until it is evicted, deepest first."""
        kv = seq.kv
        self.truncate(seq, 0)
        kv.moves = []
        kv.computed = [0] * len(kv.computed)

    # -- the prefix cache ----------------------------------------------------------------------------------------------
    def match(self, seq: Sequence, need: int | None = None) -> int:
        """Extend a block-aligned `seq` by published blocks; returns the tokens this saved.

        `need` is a bit mask of KV groups (default: those the sequence's own feeds fill): the walk stops at the first block
        where one is missing. A companion's group counts as computed only as far as its bits reach, so it never reads K/V
        that was never computed. The last known token is always left to compute: its logits are needed.
        """
        kv = seq.kv
        need = kv.groups if need is None else need
        table, size = kv.tables[0], self.block_size
        computed = kv.computed[0]
        if computed % size or len(table) * size > computed:
            return 0
        for index in range(len(table), (len(seq.tokens) - 1) // size):
            block = self._cached.get(self.hash(seq, index))
            if block is None or self._filled[block] & need != need:
                break
            if self._refs[block] == 0:
                self._lru.pop(block, None)
                self._freed.pop(block, None)
            self._refs[block] += 1
            table.append(block)
            held = self._filled[block]
            kv.computed = [
                done + size if done == index * size and held >> g & 1 else done for g, done in enumerate(kv.computed)
            ]
        kv.published = len(table)
        return kv.computed[0] - computed

    def hash(self, seq: Sequence, index: int) -> bytes:
        """Chain hash of full block `index` of a sequence's known tokens."""
        kv = seq.kv
        size = self.block_size
        while len(kv.hashes) <= index:
            at = len(kv.hashes)
            parent = kv.hashes[-1] if at else sha256(b"headrace" + kv.root).digest()
            tokens = np.array(seq.tokens[at * size : (at + 1) * size], dtype="<i4").tobytes()
            kv.hashes.append(sha256(parent + tokens).digest())
        return kv.hashes[index]

    def publish(self, seq: Sequence) -> None:
        """Offer the full, computed, exact blocks of `seq` to others."""
        kv = seq.kv
        done = kv.computed[0] if kv.exact_until is None else min(kv.computed[0], kv.exact_until)
        for index in range(kv.published, done // self.block_size):
            block, key = kv.tables[0][index], self.hash(seq, index)
            end = (index + 1) * self.block_size
            self._filled[block] |= sum(1 << g for g, count in enumerate(kv.computed) if count >= end)
            if self._hash[block] is None and self._offers_more(block, self._cached.get(key)):
                self._cached[key] = block
                self._hash[block] = key
        kv.published = max(kv.published, done // self.block_size)

    def _offers_more(self, block: int, other: int | None) -> bool:
        """Whether a block should be the one that is found; another with the same tokens and fewer groups is withdrawn."""
        if other is None:
            return True
        mine, its = self._filled[block], self._filled[other]
        if mine == its or mine & its != its:
            return False
        self._withdraw(other)
        if other in self._lru:
            del self._lru[other]
            self._free.append(other)
        return True

    def fill(self, seq: Sequence, group: int, start: int) -> None:
        """A companion's group now reaches from `start` to `seq.computed[group]`: so say the blocks that this completes."""
        for index in range(start // self.block_size, seq.kv.computed[group] // self.block_size):
            self._filled[seq.kv.tables[0][index]] |= 1 << group

    # -- self-check ----------------------------------------------------------------------------------------------------
    def check(self, seqs: Iterable[Sequence]) -> None:
        """Raise AssertionError unless counts, tables, free lists and the cache agree. `seqs`: all that hold blocks."""
        seqs = list(seqs)
        held: Counter[int] = Counter(block for seq in seqs for block in seq.kv.tables[0])
        for block in range(self.num_blocks):
            assert self._refs[block] == held[block], f"block {block}: {self._refs[block]} references, {held[block]} holders"
            key = self._hash[block]
            assert key is None or self._cached.get(key) == block, f"block {block} is published under another block"
        idle = [*self._free, *self._lru, *self._freed]
        assert len(idle) == len(set(idle)), "a block is idle twice"
        assert set(idle) == {b for b in range(self.num_blocks) if not held[b]}, "idle and held blocks do not add up"
        assert all(self._hash[block] is None for block in self._free), "a published block is in the free list"
        assert all(self._hash[block] is not None for block in self._lru), "an unpublished block is in the LRU list"
        assert len(self._cached) == sum(key is not None for key in self._hash), "the cache lists a block twice"
        for seq in seqs:
            room = len(seq.kv.tables[0]) * self.block_size
            assert max(seq.kv.computed) <= min(room, len(seq.tokens)), f"sequence {seq.id} computed more than it holds"

    # -- single blocks -------------------------------------------------------------------------------------------------
    def _count(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _written(self, seq: Sequence, start: int, end: int) -> range:
        return range(start // self.block_size, min(len(seq.kv.tables[0]), self._count(end)))

    def _take(self) -> int:
        block = self._free.popleft() if self._free else self._evict()
        self._refs[block] = 1
        self._filled[block] = 0
        return block

    def _evict(self) -> int:
        block = next(iter(self._lru))
        del self._lru[block]
        self._withdraw(block)
        return block

    def _withdraw(self, block: int) -> None:
        key = self._hash[block]
        assert key is not None
        del self._cached[key]
        self._hash[block] = None

    def _unref(self, block: int) -> None:
        self._refs[block] -= 1
        assert self._refs[block] >= 0, f"block {block} was given up twice"
        if self._refs[block] == 0:
            self._retire(block)

    def _retire(self, block: int) -> None:
        if self._scheduling:
            self._freed[block] = None
            return
        if self._hash[block] is not None and not self._keeps:
            self._withdraw(block)
        if self._hash[block] is None:
            self._free.appendleft(block)  # taken again first, while it is still in the caches
        else:
            self._lru[block] = None
