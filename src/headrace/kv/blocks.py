"""Host side of the paged KV cache: block tables, copy-on-write and the prefix cache.

A full block has the SHA-256 chain hash over the tokens up to its end (`chain`), rooted in `Holding.root`. Two sequences with
one prefix find the same blocks.

Source: Kwon et al., "PagedAttention", arXiv 2309.06180 (paging, copy-on-write).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256

from headrace.data.config import CacheConfig
from headrace.data.plan import SOURCE, TARGET, TOKENS, UPPER, WINDOWS, KVGroup
from headrace.data.types import ALL, Sequence
from headrace.kv.block_pool import BlockPool
from headrace.kv.chain import extend

Span = tuple[Sequence, int, int]  # a sequence and the token range [start, end) about to be written


class BlockManager:
    """The block tables of sequences, over their pools of blocks; owned by an engine.

    Table 0 grows with a sequence's tokens. Table 1 exists if the sequence has a source: it is written once, found by others
    only as a whole (its last block may not be full), shared by forks and never copied.

    Table 2 exists if layers have a window that is shorter than the context. It grows like table 0, in a pool of its own, and
    gives up the blocks before the window; its first entries are then -1. A prefix hit needs the window before its end.
    """

    def __init__(self, config: CacheConfig, groups: tuple[KVGroup, ...] = (TARGET,)) -> None:
        self.num_blocks = config.num_blocks
        self.block_size = config.block_size
        self.groups = groups
        self.pool = BlockPool(config)
        self.window = config.window
        self.windows = BlockPool(replace(config, num_blocks=config.window_blocks)) if config.window else None
        # The tables that grow, with their pools.
        self.growing = [(TOKENS, self.pool), *([(WINDOWS, self.windows)] if self.windows is not None else [])]
        # KV groups of the target's layers.
        self._layered = [g for g, group in enumerate(groups) if group.name in (TARGET.name, UPPER)]

    # -- one scheduling pass -------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Begin to schedule a step: blocks freed by earlier steps become usable."""
        for _, pool in self.growing:
            pool.begin()

    def end(self) -> None:
        for _, pool in self.growing:
            pool.end()

    @property
    def available(self) -> int:
        """Blocks of tokens that can be taken now."""
        return self.pool.available

    @property
    def freed_this_step(self) -> int:
        """Blocks of tokens freed during this scheduling, available at the next step."""
        return self.pool.freed_this_step

    @property
    def used(self) -> int:
        """Blocks that sequences hold, in the pool that has most of them."""
        return max(pool.num_blocks - pool.available - pool.freed_this_step for _, pool in self.growing)

    def new_tables(self, source: int = 0) -> list[list[int]]:
        """Empty block tables of a sequence with a source of `source` tokens."""
        return [[] for _ in range(1 + (WINDOWS if self.windows is not None else SOURCE if source else TOKENS))]

    # -- growing, sharing, giving up -----------------------------------------------------------------------------------
    def writable(self, seq: Sequence, position: int) -> bool:
        """Whether `grow` has nothing to do for one position: its block exists and only this sequence holds it."""
        index = position // self.block_size
        for number, pool in self.growing:
            table = seq.kv.tables[number]
            if index >= len(table) or pool.refs[table[index]] != 1 or pool.published(table[index]):
                return False
        return True

    def lacks(self, spans: Iterable[Span], reserve: int = 0, freed: bool = False) -> bool:
        """Whether a pool has fewer blocks than `grow` over all these ranges would take and `reserve` more.

        freed: blocks freed during this scheduling count as available.
        """
        spans = list(spans)
        return any(
            self.need(spans, number) + reserve > pool.available + (pool.freed_this_step if freed else 0)
            for number, pool in self.growing
        )

    def need(self, spans: Iterable[Span], number: int = TOKENS) -> int:
        """Blocks that `grow` over all these ranges would take for a table, copy-on-write included; exact even if ranges share
        blocks."""
        total, pool = 0, self._pool(number)
        dropped: dict[int, int] = {}
        for seq, start, end in spans:
            table = seq.kv.tables[number]
            total += max(0, self._count(end) - len(table)) + (self._lacking_source(seq) if number == TOKENS else 0)
            for index in self._written(seq, start, end):
                block = table[index]
                if pool.refs[block] - dropped.get(block, 0) > 1:
                    total += 1
                    dropped[block] = dropped.get(block, 0) + 1
        return total

    def grow(self, seq: Sequence, start: int, end: int) -> list[tuple[int, int, int]]:
        """Make positions [start, end) writable by `seq` alone; returns the copies (table, from, to). The caller has checked
        `need`.

        A shared block in the range is copied; a published one is withdrawn from the cache.
        """
        kv = seq.kv
        copies, written = [], self._written(seq, start, end)
        for number, pool in self.growing:
            table = kv.tables[number]
            for index in written:
                block = table[index]
                if pool.refs[block] > 1:
                    table[index] = pool.take()
                    copies.append((number, block, table[index]))
                    pool.drop(block)
                    seq.wire.synced[number] = min(seq.wire.synced[number], index)
                    kv.published = min(kv.published, index)
                elif pool.published(block):
                    pool.withdraw(block)
                    kv.published = min(kv.published, index)
            while len(table) < self._count(end):
                table.append(pool.take())
        for _ in range(self._lacking_source(seq)):
            kv.tables[SOURCE].append(self.pool.take())
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share every block of `parent`; the first to write a shared block copies it."""
        child.kv = parent.kv.fork()
        for number, table in enumerate(child.kv.tables):
            for block in _held(table):
                self._pool(number).share(block)

    def truncate(self, seq: Sequence, length: int) -> None:
        """Free the blocks beyond `length` tokens, as after a rejected draft."""
        for number, _ in self.growing:
            self._shorten(seq, number, self._count(length))
        seq.kv.published = min(seq.kv.published, length // self.block_size)

    def release(self, seq: Sequence) -> None:
        """Free every block of `seq`. Published blocks stay findable until they are evicted, the deepest first."""
        kv = seq.kv
        self.truncate(seq, 0)
        if kv.source:
            self._shorten(seq, SOURCE, 0)
        kv.moves = []
        kv.computed = [0] * len(kv.computed)
        kv.encoded = False

    def retire(self, seq: Sequence) -> None:
        """Give up the blocks of window layers that no later row of `seq` sees, the first ones first. Only with windows."""
        if seq.kv.moves:  # accepted K/V may still lie in them
            return
        table, least = seq.kv.tables[WINDOWS], min(seq.kv.computed[g] for g in self._layered)
        self._retire(table, min(self.first_seen(least), len(table)))

    def _retire(self, table: list[int], end: int) -> None:
        start = end
        while start and table[start - 1] >= 0:
            start -= 1
        for index in range(start, end):
            self._pool(WINDOWS).drop(table[index])
            table[index] = -1

    def first_seen(self, computed: int) -> int:
        """Index of the first block that window layers see from the row after `computed` tokens."""
        return max(0, computed - self.window + 1) // self.block_size

    def _shorten(self, seq: Sequence, number: int, keep: int) -> None:
        table = seq.kv.tables[number]
        for block in reversed(_held(table[keep:])):
            self._pool(number).drop(block)
        del table[keep:]
        seq.wire.synced[number] = min(seq.wire.synced[number], keep)

    # -- the prefix cache ----------------------------------------------------------------------------------------------
    def match(self, seq: Sequence, need: int | None = None, most: int = ALL) -> int:
        """Extend a block-aligned `seq` by published blocks of its first `most` tokens; returns the number of tokens saved.

        need: bit mask of KV groups (default: those that the sequence's feeds fill). The walk stops at the first block where one
        is missing. The group of another model counts as computed only as far as its bits reach, so a model never reads K/V that
        were not computed. The last known token is always left to compute, as its logits are needed. Beyond `exact_until`
        nothing is matched. Window layers need the blocks that the next row sees.
        """
        kv = seq.kv
        need = kv.groups if need is None else need
        table, size = kv.tables[0], self.block_size
        computed = kv.computed[0]
        if computed % size or len(table) * size > computed:
            return 0
        start, found = len(table), []
        for index in range(start, self.exact(seq, min(len(seq.tokens) - 1, most)) // size):
            block = self.pool.find(self.hash(seq, index), need)
            if block is None:
                break
            found.append(block)
        if self.windows is not None:
            del found[self._match_windows(seq, self.windows, len(found)) :]
        for index, block in enumerate(found, start):
            self.pool.share(block)
            table.append(block)
            held = self.pool.filled[block]
            kv.computed = [
                done + size if done == index * size and held >> g & 1 else done for g, done in enumerate(kv.computed)
            ]
        kv.published = len(table)
        return kv.computed[0] - computed

    def _match_windows(self, seq: Sequence, pool: BlockPool, count: int) -> int:
        """Extend a sequence's window table by at most `count` blocks, up to the last end before which the window is published.
        Returns the number of blocks."""
        table, size = seq.kv.tables[WINDOWS], self.block_size
        need, start = sum(1 << g for g in self._layered), len(table)
        hits = [pool.find(self.hash(seq, index), need) for index in range(start, start + count)]
        best, held = 0, len(_held(table))
        for place, block in enumerate(hits, 1):
            held = 0 if block is None else held + 1
            if held >= start + place - self.first_seen((start + place) * size):
                best = place
        first = self.first_seen((start + best) * size)
        self._retire(table, min(first, start))
        for index, block in enumerate(hits[:best], start):
            table.append(-1 if block is None or index < first else block)
            if table[-1] >= 0:
                pool.share(table[-1])
        return best

    def hash(self, seq: Sequence, index: int) -> bytes:
        """Chain hash of full block `index` of a sequence's known tokens."""
        kv = seq.kv
        extend(kv.hashes, seq.tokens, kv.root, self.block_size, index + 1)
        return kv.hashes[index]

    def publish(self, seq: Sequence) -> None:
        """Make the full, computed, exact blocks of `seq` findable."""
        kv = seq.kv
        done = self.exact(seq, kv.computed[0])
        for index in range(kv.published, done // self.block_size):
            end = (index + 1) * self.block_size
            filled = sum(1 << g for g, count in enumerate(kv.computed) if count >= end)
            for number, pool in self.growing:
                if (block := kv.tables[number][index]) >= 0:
                    pool.filled[block] |= filled
                    pool.publish(block, self.hash(seq, index))
        kv.published = max(kv.published, done // self.block_size)

    def exact(self, seq: Sequence, end: int) -> int:
        """How far below `end` a sequence's K/V are exact. Approximate K/V are neither published nor matched."""
        until = seq.kv.exact_until
        return end if until is None else min(end, until)

    def leave(self, seq: Sequence, index: int, depth: int) -> None:
        """Record that the row at a KV index exited after `depth` layers and was propagated: from here on the sequence's K/V are
        approximate."""
        seq.kv.left.append(index)
        seq.kv.depths.append(depth)
        if seq.kv.exact_until is None:
            seq.kv.exact_until = index

    def fill(self, seq: Sequence, group: int, start: int) -> None:
        """Record that a group now reaches from `start` to `computed[group]`, in the blocks that this completes. Blocks
        published without the group are published again, as a twin may be the one that is found."""
        for index in range(start // self.block_size, seq.kv.computed[group] // self.block_size):
            for number, pool in self.growing:
                block = seq.kv.tables[number][index]
                pool.filled[block] |= 1 << group
                if index < seq.kv.published:
                    pool.publish(block, self.hash(seq, index))

    # -- sources -------------------------------------------------------------------------------------------------------
    def match_source(self, seq: Sequence) -> bool:
        """Take a sequence's source from the cache; returns whether all of it was there."""
        kv = seq.kv
        assert not kv.tables[SOURCE], "a source that is not encoded has no blocks yet"
        blocks = [self.pool.find(key, 0) for key in self._source_keys(seq)]
        kv.encoded = None not in blocks
        if kv.encoded:
            kv.tables[SOURCE] = [block for block in blocks if block is not None]
            for block in kv.tables[SOURCE]:
                self.pool.share(block)
        return kv.encoded

    def source_key(self, seq: Sequence) -> bytes:
        """Hash of a sequence's source: its tokens and their tenant, both contained in the root."""
        return sha256(b"source of " + seq.kv.root).digest()

    def publish_source(self, seq: Sequence) -> None:
        """Make the blocks of an encoded source findable."""
        seq.kv.encoded = True
        for block, key in zip(seq.kv.tables[SOURCE], self._source_keys(seq), strict=True):
            self.pool.publish(block, key)

    def _source_keys(self, seq: Sequence) -> list[bytes]:
        whole = self.source_key(seq)
        return [sha256(whole + index.to_bytes(4, "little")).digest() for index in range(self._count(seq.kv.source))]

    def _lacking_source(self, seq: Sequence) -> int:
        kv = seq.kv
        return self._count(kv.source) - len(kv.tables[SOURCE]) if kv.source else 0

    # -- self-check ----------------------------------------------------------------------------------------------------
    def check(self, seqs: Iterable[Sequence], held: Iterable[int] = ()) -> None:
        """Raise AssertionError unless counts, tables, free lists and the cache agree.

        seqs: all sequences that hold blocks. held: blocks that the K/V store holds.
        """
        seqs = list(seqs)
        holders = Counter(block for seq in seqs for table in seq.kv.tables[:WINDOWS] for block in table)
        holders.update(held)
        self.pool.check(holders)
        if self.windows is not None:
            self.windows.check(Counter(block for seq in seqs for block in _held(seq.kv.tables[WINDOWS])))
        for seq in seqs:
            if self.windows is not None:
                table, first = seq.kv.tables[WINDOWS], self.first_seen(min(seq.kv.computed[g] for g in self._layered))
                assert len(table) == len(seq.kv.tables[TOKENS]), f"sequence {seq.id} has tables of two lengths"
                assert -1 not in table[first:], f"sequence {seq.id} has given up blocks that its next row sees"
            room = len(seq.kv.tables[0]) * self.block_size
            assert max(seq.kv.computed) <= min(room, len(seq.tokens)), f"sequence {seq.id} computed more than it holds"
            assert not seq.kv.encoded or not self._lacking_source(seq), f"sequence {seq.id} has not all of its source"

    def _pool(self, number: int) -> BlockPool:
        """The pool of a table's blocks."""
        return self.windows if number == WINDOWS and self.windows is not None else self.pool

    def _count(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _written(self, seq: Sequence, start: int, end: int) -> range:
        return range(start // self.block_size, min(len(seq.kv.tables[0]), self._count(end)))


def _held(table: list[int]) -> list[int]:
    """The blocks of a table that were not given up."""
    return [block for block in table if block >= 0]
