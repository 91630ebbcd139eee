"""The blocks of a paged pool: free blocks, reference counts, and the keys of published blocks."""

from collections import Counter, OrderedDict, deque

from headrace.data.config import CacheConfig


class BlockPool:
    """Owns block ids, reference counts and, per block, the KV groups that are filled.

    Blocks freed between `begin` and `end`, while a step is scheduled, are reused from the next step on, because the copies of
    one plan run in no particular order.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.num_blocks = config.num_blocks
        self.refs = [0] * config.num_blocks
        self.filled = [0] * config.num_blocks  # bit g: the block has the K/V of group g
        self._keeps = config.prefix_caching  # published blocks stay findable without a holder
        self._key: list[bytes | None] = [None] * config.num_blocks
        self._cached: dict[bytes, int] = {}  # published key -> block
        self._free: deque[int] = deque(range(config.num_blocks))
        self._lru: OrderedDict[int, None] = OrderedDict()  # published blocks without a holder, oldest first
        self._freed: dict[int, None] = {}  # freed during this scheduling, usable from the next step
        self._scheduling = False

    # -- one scheduling pass -------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Begin to schedule a step: blocks freed by earlier steps become usable."""
        self._scheduling = False
        for block in self._freed:
            self._retire(block)
        self._freed = {}
        self._scheduling = True

    def end(self) -> None:
        self._scheduling = False

    @property
    def available(self) -> int:
        """Blocks that can be taken now; published blocks without a holder are evicted when needed."""
        return len(self._free) + len(self._lru)

    @property
    def freed_this_step(self) -> int:
        """Blocks freed during this scheduling, available at the next step."""
        return len(self._freed)

    # -- holding -------------------------------------------------------------------------------------------------------
    def take(self) -> int:
        """An empty block with one holder."""
        block = self._free.popleft() if self._free else self._evict()
        self.refs[block] = 1
        self.filled[block] = 0
        return block

    def share(self, block: int) -> None:
        """Add a holder to a block, which may have none."""
        if self.refs[block] == 0:
            self._lru.pop(block, None)
            self._freed.pop(block, None)
        self.refs[block] += 1

    def drop(self, block: int) -> None:
        """Remove a holder from a block."""
        self.refs[block] -= 1
        assert self.refs[block] >= 0, f"block {block} was given up twice"
        if self.refs[block] == 0:
            self._retire(block)

    # -- finding -------------------------------------------------------------------------------------------------------
    def find(self, key: bytes, need: int) -> int | None:
        """The block published under a key, if all groups of the bit mask `need` are filled in it."""
        block = self._cached.get(key)
        return None if block is None or self.filled[block] & need != need else block

    def published(self, block: int) -> bool:
        return self._key[block] is not None

    def publish(self, block: int, key: bytes) -> None:
        """Make a block findable under a key, unless it is published already or another block with this key has as much."""
        if self._key[block] is None and self._offers_more(block, self._cached.get(key)):
            self._cached[key] = block
            self._key[block] = key

    def withdraw(self, block: int) -> None:
        key = self._key[block]
        assert key is not None
        del self._cached[key]
        self._key[block] = None

    def _offers_more(self, block: int, other: int | None) -> bool:
        """Whether a block replaces `other` under its key; a block with the same tokens and fewer groups is withdrawn."""
        if other is None:
            return True
        mine, its = self.filled[block], self.filled[other]
        if mine == its or mine & its != its:
            return False
        self.withdraw(other)
        if other in self._lru:
            del self._lru[other]
            self._free.append(other)
        return True

    # -- self-check ----------------------------------------------------------------------------------------------------
    def check(self, held: Counter[int]) -> None:
        """Raise AssertionError unless counts, free lists and the cache agree. held: number of holders of each block."""
        for block in range(self.num_blocks):
            assert self.refs[block] == held[block], f"block {block}: {self.refs[block]} references, {held[block]} holders"
            key = self._key[block]
            assert key is None or self._cached.get(key) == block, f"block {block} is published under another block"
        idle = [*self._free, *self._lru, *self._freed]
        assert len(idle) == len(set(idle)), "a block is idle twice"
        assert set(idle) == {b for b in range(self.num_blocks) if not held[b]}, "idle and held blocks do not add up"
        assert all(self._key[block] is None for block in self._free), "a published block is in the free list"
        assert all(self._key[block] is not None for block in self._lru), "an unpublished block is in the LRU list"
        assert len(self._cached) == sum(key is not None for key in self._key), "the cache lists a block twice"

    # -- single blocks -------------------------------------------------------------------------------------------------
    def _evict(self) -> int:
        block = next(iter(self._lru))
        del self._lru[block]
        self.withdraw(block)
        return block

    def _retire(self, block: int) -> None:
        if self._scheduling:
            self._freed[block] = None
            return
        if self._key[block] is not None and not self._keeps:
            self.withdraw(block)
        if self._key[block] is None:
            self._free.appendleft(block)  # reused first, while it is still in the CPU's caches
        else:
            self._lru[block] = None
