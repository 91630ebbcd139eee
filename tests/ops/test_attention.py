"""The paged attention against the textbook, over random block tables, trees, windows and mixed steps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.data.config import LayerConfig, ModelConfig
from headrace.kv.pool import KVPool
from headrace.ops import paging
from headrace.ops.attention import attend, buckets
from headrace.ops.context import Context, FeedRows, build, signed, tree
from headrace.ops.vocabulary import attention
from tests.ops.naive import Stored, attend_one, turned

DIM = 8
BLOCK = 4


def config(heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig("case", 10, heads * DIM, (LayerConfig(heads, kv_heads, DIM, 1),), 4096)


def rope() -> SimpleNamespace:
    steps = torch.arange(DIM // 2, dtype=torch.float64)
    inv_freq = 10000.0 ** (-steps / (DIM // 2))
    return SimpleNamespace(dim=DIM, interleaved=False, inv_freq=inv_freq, amplitude=1.0, growth=0.0)


class World:
    """A pool in disorder, and per sequence what the textbook has stored."""

    def __init__(self, heads: int, kv_heads: int, lengths: list[int], seed: int = 0) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads = heads, kv_heads
        blocks = [-(-n // BLOCK) for n in lengths]
        self.pool = KVPool(config(heads, kv_heads), sum(blocks) + 3, BLOCK, torch.float64)
        self.pool.data.fill_(torch.nan)  # other requests' garbage
        order = torch.randperm(sum(blocks) + 3, generator=self.rng).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in blocks]
        empty = torch.zeros(0, kv_heads, DIM, dtype=torch.float64)
        self.stored = [Stored(empty, empty) for _ in lengths]

    def draw(self, rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, DIM, generator=self.rng, dtype=torch.float64)

    def step(self, feeds: list[tuple[int, int, list[int]]], turn: bool = True, **options: Any) -> tuple[Any, Any]:
        """Feed (sequence, known tokens, parents of nodes); returns the op's rows and the textbook's."""
        rows = [
            FeedRows([0] * known, self.tables[seq], len(self.stored[seq].positions), [0] * len(parents), parents)
            for seq, known, parents in feeds
        ]
        ctx = build(self.pool, rows)
        n = len(ctx.ids)
        q, k, v = self.draw(n, self.heads), self.draw(n, self.kv_heads), self.draw(n, self.kv_heads)
        got = attention(q.flatten(1), k.flatten(1), v.flatten(1), ctx, 0, rope=rope() if turn else None, **options)
        return got.view(n, self.heads, DIM), self.textbook(ctx, feeds, q, k, v, turn, options)

    def textbook(self, ctx: Context, feeds: list[Any], q: Any, k: Any, v: Any, turn: bool, options: dict[str, Any]) -> Any:
        options = dict(options)
        causal = options.pop("causal", True)
        if "sinks" in options:
            options["sinks"] = options["sinks"].weight
        expected, at = [], 0
        for seq, known, parents in feeds:
            stored, size = self.stored[seq], known + len(parents)
            start = len(stored.positions)
            positions = ctx.positions[at : at + size].tolist()
            keys = [turned(k[at + i], positions[i]) if turn else k[at + i] for i in range(size)]
            everything = Stored(
                torch.cat([stored.keys, torch.stack(keys)]),
                torch.cat([stored.values, v[at : at + size]]),
                stored.positions + positions,
            )
            for i in range(size):
                query = turned(q[at + i], positions[i]) if turn else q[at + i]
                seen = list(range(start + size)) if not causal else visible(start, known, parents, i)
                expected.append(attend_one(query, positions[i], everything, seen, **options))
            kept = start + known  # nodes are rejected: what follows overwrites them
            self.stored[seq] = Stored(everything.keys[:kept], everything.values[:kept], everything.positions[:kept])
            at += size
        return torch.stack(expected)


def visible(start: int, known: int, parents: list[int], row: int) -> list[int]:
    """KV indices that a row of a feed sees, by walking up the tree."""
    if row < known:
        return list(range(start + row + 1))
    path, node = [], row - known
    while node >= 0:
        path.append(start + known + node)
        node = parents[node]
    return [*range(start + known), *reversed(path)]


SHAPES = [(4, 4), (4, 2), (4, 1), (6, 3)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 6},
    "scale and softcap": {"scale": 0.7, "softcap": 1.5},
    "window, softcap and sinks": {
        "window": 9,
        "softcap": 3.0,
        "sinks": SimpleNamespace(weight=torch.linspace(-1, 1, 4, dtype=torch.float64)),
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES[:3])
def test_mixed_steps_equal_the_textbook(heads: int, kv_heads: int, options: dict[str, Any]) -> None:
    """Four sequences over shuffled blocks: whole prompts, chunks, single tokens and trees in the same steps."""
    world = World(heads, kv_heads, [30, 30, 30, 30], seed=heads + kv_heads)
    steps: list[list[tuple[int, int, list[int]]]] = [
        [(0, 11, []), (1, 3, []), (2, 1, [])],
        [(1, 4, []), (2, 1, [-1, -1, 0, 2]), (0, 1, [])],
        [(3, 13, [-1, 0, 1]), (0, 1, [-1]), (1, 1, []), (2, 7, [])],
        [(0, 1, []), (1, 1, []), (2, 1, []), (3, 1, [-1, 0, 0, 1, 1, 2, 2])],
    ]
    for feeds in steps:
        got, expected = world.step(feeds, **options)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_long_chunks_are_tiled_and_scores_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of several tiles, its nodes in the last one; and the same with room for one tile at a time."""
    for bound in (paging.MAX_SCORES, 1):
        monkeypatch.setattr(paging, "MAX_SCORES", bound)
        for window in (None, 20):
            world = World(2, 1, [200, 90])
            world.step([(0, 5, [])])
            got, expected = world.step([(0, 150, [-1, 0, -1]), (1, 64, [])], window=window)
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_a_tree_of_64_nodes() -> None:
    """The last node uses the sign bit of the int64 that carries the mask."""
    parents = [-1, *(i // 2 for i in range(63))]
    assert tree(parents)[1][63] >> 63 == 1
    assert signed(tree(parents)[1][63]) < 0
    world = World(2, 2, [100])
    world.step([(0, 9, [])])
    got, expected = world.step([(0, 1, parents)])
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_a_window_counts_positions_in_a_tree() -> None:
    """Twenty siblings share one position, however far apart their K and V lie; a chain of eight outruns a window of four."""
    parents = [-1] * 20 + [19, 20, 21, 22, 23, 24, 25]
    world = World(2, 2, [60])
    world.step([(0, 9, [])])
    got, expected = world.step([(0, 2, parents)], window=4)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_without_the_mask_a_tree_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: nodes that see all nodes before them (a chain) give other rows."""
    monkeypatch.setattr(
        "headrace.ops.context.tree", lambda parents: (tree(parents)[0], [(2 << i) - 1 for i in range(len(parents))])
    )
    world = World(2, 2, [40])
    world.step([(0, 9, [])])
    got, expected = world.step([(0, 1, [-1, -1, 0, 1])])
    torch.testing.assert_close(got[:2], expected[:2], rtol=1e-10, atol=1e-10)  # the known token and the first node
    assert float((got[2:] - expected[2:]).abs().max()) > 1e-2


def test_a_wrong_block_table_is_wrong() -> None:
    """Negative control: one block of the table is another sequence's. (The order of full blocks alone would not matter to a
    row that sees all of them: keys carry their positions.)"""
    world = World(2, 2, [40, 40])
    world.step([(0, 9, []), (1, 9, [])])
    world.tables[0][1] = world.tables[1][1]
    got, expected = world.step([(0, 1, [])])
    assert float((got - expected).abs().max()) > 1e-2


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_paged_equals_contiguous(heads: int, kv_heads: int) -> None:
    """Card D1: the same sequence over ordered and over shuffled blocks gives the same bits."""
    world = World(heads, kv_heads, [23])
    q, k, v = world.draw(23, heads), world.draw(23, kv_heads), world.draw(23, kv_heads)
    rows = []
    for table in (list(range(6)), [5, 0, 3, 1, 4, 2]):
        pool = KVPool(config(heads, kv_heads), 6, BLOCK, torch.float64)
        ctx = build(pool, [FeedRows([0] * 23, table)])
        rows.append(attention(q.flatten(1), k.flatten(1), v.flatten(1), ctx, 0))
    assert torch.equal(rows[0], rows[1])


def test_bidirectional_feeds_see_the_whole_feed() -> None:
    world = World(4, 2, [20, 20])
    got, expected = world.step([(0, 7, []), (1, 12, [])], causal=False)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_other_rows_of_a_step_change_no_bit() -> None:
    """A decode row alone, and among other decode rows and a chunk."""
    rows = []
    for others in ([], [(1, 3, []), (2, 1, [-1, 0]), (3, 70, [])]):
        world = World(4, 2, [40, 40, 40, 90])
        world.step([(0, 21, [])])
        world.rng.manual_seed(7)
        q, k, v = world.draw(1, 4), world.draw(1, 2), world.draw(1, 2)
        feeds = [FeedRows([0], world.tables[0], 21)]
        feeds += [FeedRows([0] * known, world.tables[seq], 0, [0] * len(p), p) for seq, known, p in others]
        ctx = build(world.pool, feeds)
        rest = len(ctx.ids) - 1
        more = [torch.cat([x, world.draw(rest, x.shape[1])]).flatten(1) for x in (q, k, v)]
        rows.append(attention(*more, ctx, 0, rope=rope())[0])  # type: ignore[call-arg]
    assert torch.equal(rows[0], rows[1])


# -- the arithmetic itself --------------------------------------------------------------------------------------------


def test_weights_sum_to_one_and_a_row_that_sees_nothing_is_zero() -> None:
    q, k = torch.randn(1, 5, 4, DIM), torch.randn(1, 9, 2, DIM)
    visible_keys = torch.rand(1, 5, 9) < 0.5
    visible_keys[0, 2] = False
    visible_keys[0, 3, 0] = True
    ones = attend(q, k, torch.ones(1, 9, 2, DIM), visible_keys)
    expected = visible_keys.any(-1)[0].float()
    torch.testing.assert_close(ones[0], expected[:, None, None].expand(5, 4, DIM))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_logits_do_not_overflow(dtype: torch.dtype) -> None:
    """Scores of 1e30: the softmax is one-hot, not NaN."""
    q = torch.full((1, 1, 1, DIM), 1e15, dtype=dtype)
    k = torch.randn(1, 6, 1, DIM, dtype=dtype) * 1e15
    v = torch.randn(1, 6, 1, DIM, dtype=dtype)
    best = int((k[0, :, 0] @ q[0, 0, 0]).argmax())
    torch.testing.assert_close(attend(q, k, v, torch.ones(1, 1, 6, dtype=torch.bool))[0, 0, 0], v[0, best, 0])


def test_gqa_with_equal_kv_heads_is_mha() -> None:
    """Card E2: K and V repeated over their group give MHA's bits; and n_kv = h is MHA."""
    q = torch.randn(2, 3, 8, DIM, dtype=torch.float64)
    k, v = torch.randn(2, 7, 2, DIM, dtype=torch.float64), torch.randn(2, 7, 2, DIM, dtype=torch.float64)
    seen = torch.ones(2, 3, 7, dtype=torch.bool)
    grouped = attend(q, k, v, seen)
    repeated = attend(q, k.repeat_interleave(4, 2), v.repeat_interleave(4, 2), seen)
    torch.testing.assert_close(grouped, repeated, rtol=1e-14, atol=1e-14)
    wrong = attend(q, k.repeat(1, 1, 4, 1), v.repeat(1, 1, 4, 1), seen)  # negative control: heads dealt out in turn
    assert float((grouped - wrong).abs().max()) > 1e-2


def test_against_torch_sdpa() -> None:
    q, k, v = (torch.randn(2, 9, 4, DIM, dtype=torch.float64) for _ in range(3))
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    ours = attend(q * DIM**-0.5, k, v, causal.expand(2, 9, 9))
    theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_rows_of_every_feed_read_the_whole_source() -> None:
    """Against dense attention; blocks in disorder, the last of them part garbage, feeds of several rows and a tree."""
    world = World(4, 2, [8, 12, 9, 5])
    k, v = world.draw(17, 2), world.draw(17, 2)
    lengths, tables = (6, 11), world.tables[:2]
    at = [table[i // BLOCK] * BLOCK + i % BLOCK for length, table in zip(lengths, tables, strict=True) for i in range(length)]
    world.pool.write(0, torch.tensor(at), k, v)
    rows = [
        FeedRows([1, 2], world.tables[2], source=6, source_table=tables[0]),
        FeedRows([3], world.tables[3], 1, [1, 2], [-1, -1], source=11, source_table=tables[1]),
    ]
    ctx, q = build(world.pool, rows), world.draw(5, 4)
    got = attention(q.flatten(1), None, None, ctx, 0, source=True).view(5, 4, DIM)
    seen = [(0, 6), (0, 6), (6, 17), (6, 17), (6, 17)]
    for row, (start, end) in enumerate(seen):
        dense = torch.ones(1, 1, end - start, dtype=torch.bool)
        expected = attend(q[None, row : row + 1] * DIM**-0.5, k[None, start:end], v[None, start:end], dense)
        torch.testing.assert_close(got[row], expected[0, 0], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="with K and V or without both"):
        attention(q.flatten(1), world.draw(5, 2).flatten(1), None, ctx, 0)
    with pytest.raises(ValueError, match="has no source"):
        attention(q.flatten(1), None, None, build(world.pool, [FeedRows([0] * 5, world.tables[1])]), 0, source=True)


def test_buckets_of_distances_equal_those_of_the_paper() -> None:
    """By hand for 8 buckets up to 16: single distances, then logarithms, then one for all that is farther."""
    back = torch.tensor([5, 0, -1, -2, -3, -4, -5, -6, -8, -12, -15, -16, -400])
    assert buckets(back, 8, 16, False).tolist() == [0, 0, 1, 2, 3, 4, 4, 5, 6, 7, 7, 7, 7]
    both = torch.tensor([-400, -2, -1, 0, 1, 2, 3, 4, 9, 400])
    assert buckets(both, 8, 16, True).tolist() == [3, 2, 1, 0, 5, 6, 6, 6, 7, 7]
