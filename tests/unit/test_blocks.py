"""The block manager against a model of plain dictionaries, and its single rules."""

import random

import pytest

from headrace.data.config import CacheConfig
from headrace.data.plan import KVGroup
from headrace.data.types import Holding, Sequence
from headrace.kv.blocks import BlockManager

BLOCK = 4


def sequence(tokens: list[int], number: int = 0, root: bytes = b"") -> Sequence:
    return Sequence(number, tokens, len(tokens), Holding(root))


def computed(blocks: BlockManager, seq: Sequence, end: int | None = None) -> list[tuple[int, int, int]]:
    """Grow, compute and publish a sequence up to `end`; the copies this took."""
    end = len(seq.tokens) if end is None else end
    copies = blocks.grow(seq, min(seq.kv.computed), end)
    seq.kv.computed = [end]
    blocks.publish(seq)
    return copies


@pytest.fixture
def blocks() -> BlockManager:
    return BlockManager(CacheConfig(16, BLOCK))


def test_a_fork_shares_and_the_first_writer_copies(blocks: BlockManager) -> None:
    parent = sequence(list(range(6)))
    computed(blocks, parent)
    child = sequence(list(range(6)), 1)
    blocks.fork(parent, child)
    assert blocks.used == 2
    parent.tokens.append(50)
    child.tokens.append(60)
    spans = [(parent, 6, 7), (child, 6, 7)]
    assert blocks.need(spans) == 1, "of two sharers only one has to copy"
    shared = parent.kv.tables[0][1]
    copies = blocks.grow(parent, 6, 7)
    assert copies == [(0, shared, parent.kv.tables[0][1])]
    assert blocks.grow(child, 6, 7) == []
    assert child.kv.tables[0][1] == shared
    assert parent.kv.tables[0][0] == child.kv.tables[0][0]
    blocks.check([parent, child])


def test_need_equals_the_blocks_that_grow_takes() -> None:
    rng = random.Random(0)
    for _ in range(200):
        blocks = BlockManager(CacheConfig(64, BLOCK))
        parent = sequence([rng.randrange(9) for _ in range(rng.randrange(1, 20))])
        computed(blocks, parent)
        family = [parent]
        for number in range(rng.randrange(4)):
            child = sequence(list(parent.tokens), number + 1)
            blocks.fork(parent, child)
            family.append(child)
        spans = []
        for seq in family:
            seq.tokens += [rng.randrange(9) for _ in range(rng.randrange(1, 9))]
            spans.append((seq, min(seq.kv.computed), len(seq.tokens)))
        need, before = blocks.need(spans), blocks.available
        for seq, start, end in spans:
            blocks.grow(seq, start, end)
        assert before - blocks.available == need


def test_a_match_stops_before_the_last_token_and_at_a_difference(blocks: BlockManager) -> None:
    first = sequence(list(range(12)))
    computed(blocks, first)
    again = sequence(list(range(12)), 1)
    assert blocks.match(again) == 8, "the last token is always computed: its logits are needed"
    other = sequence([*range(6), 99, *range(7, 14)], 2)
    assert blocks.match(other) == 4
    assert blocks.match(sequence(list(range(12)), 3, root=b"tenant")) == 0
    longer = sequence(list(range(30)), 4)
    assert blocks.match(longer) == 12


def test_a_match_needs_every_group() -> None:
    blocks = BlockManager(CacheConfig(16, BLOCK), (KVGroup("target"), KVGroup("draft")))
    seq = sequence(list(range(9)))
    seq.kv.computed = [0, 0]
    blocks.grow(seq, 0, 9)
    seq.kv.computed = [9, 9]
    seq.kv.computed[1] = 0
    blocks.publish(seq)
    twin = sequence(list(range(9)), 1)
    twin.kv.computed, twin.kv.groups = [0, 0], 0b11
    assert blocks.match(twin) == 0, "the draft's K/V was never computed"
    assert blocks.match(twin, need=0b01) == 8
    assert twin.kv.computed == [8, 0]


def test_a_match_prefers_the_block_with_more_groups() -> None:
    blocks = BlockManager(CacheConfig(16, BLOCK), (KVGroup("target"), KVGroup("amateur")))
    seqs = [sequence(list(range(9)), number) for number in range(3)]
    for seq, counts in zip(seqs, ([9, 0], [9, 9], [9, 0]), strict=True):
        seq.kv.computed = [0, 0]
        blocks.grow(seq, 0, 9)
        seq.kv.computed = counts
        blocks.publish(seq)
        blocks.check(seqs[: seq.id + 1])
    twin = sequence(list(range(9)), 3)
    twin.kv.computed, twin.kv.groups = [0, 0], 0b11
    assert blocks.match(twin) == 8
    assert twin.kv.tables[0] == seqs[1].kv.tables[0][:2]
    blocks.release(seqs[0])
    blocks.check([*seqs, twin])


def test_a_match_prefers_the_block_that_was_filled_first() -> None:
    """Both are published while a group lags. The one that is found may never get the group: its request has ended."""
    blocks = BlockManager(CacheConfig(16, BLOCK), (KVGroup("target"), KVGroup("upper")))
    first, second = (sequence(list(range(9)), number) for number in range(2))
    for seq in (first, second):
        seq.kv.computed = [0, 0]
        blocks.grow(seq, 0, 9)
        seq.kv.computed = [9, 0]
        blocks.publish(seq)
    blocks.release(first)
    second.kv.computed[1] = 6
    blocks.fill(second, 1, 0)
    blocks.check([second])
    found = sequence(list(range(9)), 2)
    found.kv.computed, found.kv.groups = [0, 0], 0b11
    assert blocks.match(found) == 4, "the block that is not full of the group is not found"
    assert found.kv.tables[0] == second.kv.tables[0][:1]
    blocks.check([second, found])


def test_inexact_blocks_are_not_published(blocks: BlockManager) -> None:
    seq = sequence(list(range(12)))
    seq.kv.exact_until = 6
    computed(blocks, seq)
    assert blocks.match(sequence(list(range(12)), 1)) == 4


def test_approximate_blocks_do_not_match_exact_ones(blocks: BlockManager) -> None:
    computed(blocks, sequence(list(range(12))))
    seq, twin = sequence(list(range(12)), 1), sequence(list(range(12)), 2)
    blocks.leave(seq, 6, 1)
    blocks.fork(seq, twin)
    blocks.leave(seq, 9, 2)
    assert (seq.kv.exact_until, seq.kv.left) == (6, [6, 9])
    assert (twin.kv.exact_until, twin.kv.left) == (6, [6])
    assert [blocks.match(one) for one in (seq, twin, sequence(list(range(12)), 3))] == [4, 4, 8]


def test_released_blocks_stay_findable_until_evicted_deepest_first(blocks: BlockManager) -> None:
    seq = sequence(list(range(12)))
    computed(blocks, seq)
    blocks.release(seq)
    assert blocks.used == 0
    assert blocks.available == 16
    hog = sequence(list(range(100, 100 + 14 * BLOCK)), 1)
    computed(blocks, hog)
    assert blocks.match(sequence(list(range(13)), 2)) == 8, "the deepest block went first"


def test_without_prefix_caching_nothing_stays_and_the_same_blocks_are_taken_again() -> None:
    blocks = BlockManager(CacheConfig(16, BLOCK, prefix_caching=False))
    first, sibling = sequence(list(range(9))), sequence(list(range(9)), 1)
    computed(blocks, first)
    assert blocks.match(sibling) == 8, "siblings share what one of them holds"
    held = set(first.kv.tables[0])
    for seq in (first, sibling):
        blocks.release(seq)
    blocks.check([])
    again = sequence(list(range(9)), 2)
    assert blocks.match(again) == 0
    computed(blocks, again)
    assert set(again.kv.tables[0]) == held, "memory that was never touched is taken instead"
    blocks.check([again])


def test_blocks_freed_during_scheduling_are_reused_in_the_next_step(blocks: BlockManager) -> None:
    hog = sequence(list(range(16 * BLOCK)))
    blocks.grow(hog, 0, 16 * BLOCK)
    blocks.begin()
    blocks.truncate(hog, 15 * BLOCK)
    assert (blocks.available, blocks.freed_this_step, blocks.used) == (0, 1, 15)
    blocks.check([hog])
    blocks.end()
    blocks.begin()
    assert (blocks.available, blocks.freed_this_step) == (1, 0)


def test_writing_into_a_published_block_withdraws_it(blocks: BlockManager) -> None:
    seq = sequence(list(range(8)))
    computed(blocks, seq)
    seq.kv.computed = [6]
    seq.tokens[6:] = [70, 71]
    seq.kv.hashes = seq.kv.hashes[:1]
    assert blocks.grow(seq, 6, 8) == []
    reader = sequence([*range(9)], 1)
    assert blocks.match(reader) == 4
    blocks.check([seq, reader])


def test_hashes_chain(blocks: BlockManager) -> None:
    """Equal blocks after different beginnings are different blocks."""
    first, second = sequence([1, 2, 3, 4, 9, 9, 9, 9, 0]), sequence([5, 6, 7, 8, 9, 9, 9, 9, 0], 1)
    assert blocks.hash(first, 1) != blocks.hash(second, 1)
    computed(blocks, first)
    assert blocks.match(second) == 0


def test_a_position_is_writable_in_an_unshared_unpublished_block(blocks: BlockManager) -> None:
    seq = sequence(list(range(6)))
    assert not blocks.writable(seq, 0)
    computed(blocks, seq)
    assert [blocks.writable(seq, position) for position in (3, 4, 7, 8, 12)] == [False, True, True, False, False]
    child = sequence(list(range(6)), 1)
    blocks.fork(seq, child)
    assert not blocks.writable(seq, 4)
    blocks.release(child)
    assert blocks.writable(seq, 4)


def test_fill_publishes_only_full_blocks_of_a_draft_group() -> None:
    blocks = BlockManager(CacheConfig(16, BLOCK), (KVGroup("target"), KVGroup("draft")))
    seq = sequence(list(range(13)))
    seq.kv.computed = [0, 0]
    blocks.grow(seq, 0, 13)
    seq.kv.computed = [13, 0]
    blocks.publish(seq)
    found = []
    for start, end in ((0, 3), (3, 7), (7, 12)):
        seq.kv.computed[1] = end
        blocks.fill(seq, 1, start)
        twin = sequence(list(range(13)), 1)
        twin.kv.computed, twin.kv.groups = [0, 0], 0b11
        found.append((blocks.match(twin), list(twin.kv.computed)))
        blocks.release(twin)
    assert found == [(0, [0, 0]), (4, [4, 4]), (12, [12, 12])]


def test_a_match_ends_where_each_group_was_computed(blocks: BlockManager) -> None:
    """The companion's count stops where its bits do, and does not go on behind a gap."""
    seq = sequence(list(range(13)))
    seq.kv.computed = [0, 0]
    blocks.grow(seq, 0, 13)
    seq.kv.computed = [13, 4]
    blocks.publish(seq)
    seq.kv.computed[1] = 12
    blocks.fill(seq, 1, 8)  # the third block, and not the second
    twin = sequence(list(range(13)), 1)
    twin.kv.computed = [0, 0]
    assert blocks.match(twin, need=0b01) == 12
    assert twin.kv.computed == [12, 4]


def test_double_release_is_caught(blocks: BlockManager) -> None:
    seq = sequence(list(range(5)))
    blocks.grow(seq, 0, 5)
    table = list(seq.kv.tables[0])
    blocks.release(seq)
    seq.kv.tables = [table]
    with pytest.raises(AssertionError, match="given up twice"):
        blocks.release(seq)


def test_check_sees_a_leak_and_a_stolen_block(blocks: BlockManager) -> None:
    seq = sequence(list(range(5)))
    blocks.grow(seq, 0, 5)
    with pytest.raises(AssertionError, match="references"):
        blocks.check([])
    blocks.pool._free.append(seq.kv.tables[0][0])
    with pytest.raises(AssertionError, match="do not add up"):
        blocks.check([seq])


def test_ten_thousand_operations_against_a_dictionary() -> None:
    """Content by (sequence, position), kept in dictionaries, equals content read through the tables."""
    rng = random.Random(7)
    blocks = BlockManager(CacheConfig(48, BLOCK))
    pool: dict[int, int] = {}  # flat position -> token
    alive: list[Sequence] = []
    names = iter(range(10**6))

    def write(seq: Sequence) -> None:
        start = min(seq.kv.computed)
        if blocks.need([(seq, start, len(seq.tokens))]) > blocks.available:
            blocks.release(seq)
            alive.remove(seq)
            return
        for _, source, to in blocks.grow(seq, start, len(seq.tokens)):
            for at in range(BLOCK):
                pool[to * BLOCK + at] = pool.get(source * BLOCK + at, -1)
        for at in range(start, len(seq.tokens)):
            pool[seq.kv.tables[0][at // BLOCK] * BLOCK + at % BLOCK] = seq.tokens[at]
        seq.kv.computed = [len(seq.tokens)]
        blocks.publish(seq)

    for step in range(10_000):
        action = rng.random()
        if action < 0.2 or not alive:
            seq = sequence([rng.randrange(3) for _ in range(rng.randrange(1, 14))], next(names))
            alive.append(seq)
            blocks.match(seq)
            write(seq)
        elif action < 0.7:
            seq = rng.choice(alive)
            seq.tokens.append(rng.randrange(3))
            write(seq)
        elif action < 0.8:
            parent = rng.choice(alive)
            child = sequence(list(parent.tokens), next(names))
            blocks.fork(parent, child)
            alive.append(child)
        elif action < 0.95:
            seq = alive.pop(rng.randrange(len(alive)))
            blocks.release(seq)
        else:
            seq = rng.choice(alive)  # preempted, and back at once
            blocks.release(seq)
            blocks.match(seq)
            write(seq)
        for seq in alive:
            read = [pool[seq.kv.tables[0][at // BLOCK] * BLOCK + at % BLOCK] for at in range(min(seq.kv.computed))]
            assert read == seq.tokens[: len(read)], f"step {step}"
        if step % 10 == 0:
            blocks.check(alive)
    for seq in alive:
        blocks.release(seq)
    assert blocks.used == 0
