"""Host side of the paged KV cache: block tables, copy-on-write and the prefix cache.

A full block has the SHA-256 chain hash over the tokens up to its end (`chain`), rooted in `Holding.root`. Two sequences with
one prefix find the same blocks.

Source: Kwon et al., "PagedAttention", arXiv 2309.06180 (paging, copy-on-write).
"""

from collections import Counter
from collections.abc import Iterable
from hashlib import sha256

from headrace.data.config import CacheConfig
from headrace.data.plan import TARGET, KVGroup
from headrace.data.types import ALL, Sequence
from headrace.kv.block_pool import BlockPool
from headrace.kv.chain import extend

Span = tuple[Sequence, int, int]  # a sequence and the token range [start, end) about to be written


class BlockManager:
    """The block tables of sequences, over one pool of blocks; owned by an engine.

    Table 0 grows with a sequence's tokens. Table 1 exists if the sequence has a source: it is written once, found by others
    only as a whole (its last block may not be full), shared by forks and never copied.
    """

    def __init__(self, config: CacheConfig, groups: tuple[KVGroup, ...] = (TARGET,)) -> None:
        self.num_blocks = config.num_blocks
        self.block_size = config.block_size
        self.groups = groups
        self.pool = BlockPool(config)

    # -- one scheduling pass -------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Begin to schedule a step: blocks freed by earlier steps become usable."""
        self.pool.begin()

    def end(self) -> None:
        self.pool.end()

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return self.pool.available

    @property
    def freed_this_step(self) -> int:
        """Blocks freed during this scheduling, available at the next step."""
        return self.pool.freed_this_step

    @property
    def used(self) -> int:
        return self.num_blocks - self.available - self.freed_this_step

    # -- growing, sharing, giving up -----------------------------------------------------------------------------------
    def writable(self, seq: Sequence, position: int) -> bool:
        """Whether `grow` has nothing to do for one position: its block exists and only this sequence holds it."""
        table, index = seq.kv.tables[0], position // self.block_size
        return index < len(table) and self.pool.refs[table[index]] == 1 and not self.pool.published(table[index])

    def need(self, spans: Iterable[Span]) -> int:
        """Blocks that `grow` over all these ranges would take, copy-on-write included; exact even if ranges share blocks."""
        total = 0
        dropped: dict[int, int] = {}
        for seq, start, end in spans:
            table = seq.kv.tables[0]
            total += max(0, self._count(end) - len(table)) + self._lacking_source(seq)
            for index in self._written(seq, start, end):
                block = table[index]
                if self.pool.refs[block] - dropped.get(block, 0) > 1:
                    total += 1
                    dropped[block] = dropped.get(block, 0) + 1
        return total

    def grow(self, seq: Sequence, start: int, end: int) -> list[tuple[int, int, int]]:
        """Make positions [start, end) writable by `seq` alone; returns the copies (table, from, to). The caller has checked
        `need`.

        A shared block in the range is copied; a published one is withdrawn from the cache.
        """
        kv = seq.kv
        table = kv.tables[0]
        copies = []
        for index in self._written(seq, start, end):
            block = table[index]
            if self.pool.refs[block] > 1:
                table[index] = self.pool.take()
                copies.append((0, block, table[index]))
                self.pool.drop(block)
                seq.wire.synced[0] = min(seq.wire.synced[0], index)
                kv.published = min(kv.published, index)
            elif self.pool.published(block):
                self.pool.withdraw(block)
                kv.published = min(kv.published, index)
        while len(table) < self._count(end):
            table.append(self.pool.take())
        for _ in range(self._lacking_source(seq)):
            kv.tables[1].append(self.pool.take())
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share every block of `parent`; the first to write a shared block copies it."""
        child.kv = parent.kv.fork()
        for table in child.kv.tables:
            for block in table:
                self.pool.share(block)

    def truncate(self, seq: Sequence, length: int) -> None:
        """Free the blocks beyond `length` tokens, as after a rejected draft."""
        self._shorten(seq, 0, self._count(length))
        seq.kv.published = min(seq.kv.published, length // self.block_size)

    def release(self, seq: Sequence) -> None:
        """Free every block of `seq`. Published blocks stay findable until they are evicted, the deepest first."""
        kv = seq.kv
        self.truncate(seq, 0)
        for table in range(1, len(kv.tables)):
            self._shorten(seq, table, 0)
        kv.moves = []
        kv.computed = [0] * len(kv.computed)
        kv.encoded = False

    def _shorten(self, seq: Sequence, number: int, keep: int) -> None:
        table = seq.kv.tables[number]
        for block in reversed(table[keep:]):
            self.pool.drop(block)
        del table[keep:]
        seq.wire.synced[number] = min(seq.wire.synced[number], keep)

    # -- the prefix cache ----------------------------------------------------------------------------------------------
    def match(self, seq: Sequence, need: int | None = None, most: int = ALL) -> int:
        """Extend a block-aligned `seq` by published blocks of its first `most` tokens; returns the number of tokens saved.

        need: bit mask of KV groups (default: those that the sequence's feeds fill). The walk stops at the first block where one
        is missing. The group of another model counts as computed only as far as its bits reach, so a model never reads K/V that
        were not computed. The last known token is always left to compute, as its logits are needed. Beyond `exact_until`
        nothing is matched.
        """
        kv = seq.kv
        need = kv.groups if need is None else need
        table, size = kv.tables[0], self.block_size
        computed = kv.computed[0]
        if computed % size or len(table) * size > computed:
            return 0
        for index in range(len(table), self.exact(seq, min(len(seq.tokens) - 1, most)) // size):
            block = self.pool.find(self.hash(seq, index), need)
            if block is None:
                break
            self.pool.share(block)
            table.append(block)
            held = self.pool.filled[block]
            kv.computed = [
                done + size if done == index * size and held >> g & 1 else done for g, done in enumerate(kv.computed)
            ]
        kv.published = len(table)
        return kv.computed[0] - computed

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
            block, end = kv.tables[0][index], (index + 1) * self.block_size
            self.pool.filled[block] |= sum(1 << g for g, count in enumerate(kv.computed) if count >= end)
            self.pool.publish(block, self.hash(seq, index))
        kv.published = max(kv.published, done // self.block_size)

    def exact(self, seq: Sequence, end: int) -> int:
        """How far below `end` a sequence's K/V are exact. Approximate K/V are neither published nor matched."""
        until = seq.kv.exact_until
        return end if until is None else min(end, until)

    def leave(self, seq: Sequence, index: int) -> None:
        """Record that the row at a KV index exited and was propagated: from here on the sequence's K/V are approximate."""
        seq.kv.left.append(index)
        if seq.kv.exact_until is None:
            seq.kv.exact_until = index

    def fill(self, seq: Sequence, group: int, start: int) -> None:
        """Record that a group now reaches from `start` to `computed[group]`, in the blocks that this completes. Blocks
        published without the group are published again, as a twin may be the one that is found."""
        for index in range(start // self.block_size, seq.kv.computed[group] // self.block_size):
            block = seq.kv.tables[0][index]
            self.pool.filled[block] |= 1 << group
            if index < seq.kv.published:
                self.pool.publish(block, self.hash(seq, index))

    # -- sources -------------------------------------------------------------------------------------------------------
    def match_source(self, seq: Sequence) -> bool:
        """Take a sequence's source from the cache; returns whether all of it was there."""
        kv = seq.kv
        assert not kv.tables[1], "a source that is not encoded has no blocks yet"
        blocks = [self.pool.find(key, 0) for key in self._source_keys(seq)]
        kv.encoded = None not in blocks
        if kv.encoded:
            kv.tables[1] = [block for block in blocks if block is not None]
            for block in kv.tables[1]:
                self.pool.share(block)
        return kv.encoded

    def source_key(self, seq: Sequence) -> bytes:
        """Hash of a sequence's source: its tokens and their tenant, both contained in the root."""
        return sha256(b"source of " + seq.kv.root).digest()

    def publish_source(self, seq: Sequence) -> None:
        """Make the blocks of an encoded source findable."""
        seq.kv.encoded = True
        for block, key in zip(seq.kv.tables[1], self._source_keys(seq), strict=True):
            self.pool.publish(block, key)

    def _source_keys(self, seq: Sequence) -> list[bytes]:
        whole = self.source_key(seq)
        return [sha256(whole + index.to_bytes(4, "little")).digest() for index in range(self._count(seq.kv.source))]

    def _lacking_source(self, seq: Sequence) -> int:
        kv = seq.kv
        return self._count(kv.source) - len(kv.tables[1]) if kv.source else 0

    # -- self-check ----------------------------------------------------------------------------------------------------
    def check(self, seqs: Iterable[Sequence]) -> None:
        """Raise AssertionError unless counts, tables, free lists and the cache agree. seqs: all sequences that hold blocks."""
        seqs = list(seqs)
        self.pool.check(Counter(block for seq in seqs for table in seq.kv.tables for block in table))
        for seq in seqs:
            room = len(seq.kv.tables[0]) * self.block_size
            assert max(seq.kv.computed) <= min(room, len(seq.tokens)), f"sequence {seq.id} computed more than it holds"
            assert not seq.kv.encoded or not self._lacking_source(seq), f"sequence {seq.id} has not all of its source"

    def _count(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _written(self, seq: Sequence, start: int, end: int) -> range:
        return range(start // self.block_size, min(len(seq.kv.tables[0]), self._count(end)))
