"""Native attention and its KV pool: against float64, and bit for bit against itself however the rows are fed."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace import core
from headrace.data.config import LayerConfig, ModelConfig
from headrace.kv.pool import KVPool
from headrace.kv.rounded import to_int4
from headrace.ops.attention import attention
from headrace.ops.context import FeedRows, build, tree
from tests.ops.native_step import Feed, Shape, Stepper, reference

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

module = core.module()
ISAS = module.cpu_info()["isas"]
DTYPES = ("bf16", "int8", "int4", "f32")
TOLERANCE = {"bf16": 1e-2, "int8": 1e-3, "int4": 1e-3, "f32": 3e-6}  # of the largest value; bf16 rounds queries and weights
THREADS = {n: module.ThreadPool(n) for n in (1, 2)}


def rows(n: int, shape: Shape, seed: int) -> np.ndarray:
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


def tables(rng: random.Random, lengths: list[int], block_size: int) -> tuple[list[list[int]], int]:
    """Permuted tables for sequences of these lengths, and how many blocks they take (some are nobody's)."""
    needed = [-(-length // block_size) for length in lengths]
    free = list(range(sum(needed) + 3))
    rng.shuffle(free)
    return [[free.pop() for _ in range(n)] for n in needed], sum(needed) + 3


def fill(stepper: Stepper, feeds: list[Feed], seed: int) -> None:
    """What the sequences' earlier tokens left in the pool."""
    for i, feed in enumerate(feeds):
        if feed.start:
            past = Feed(0, feed.start, (), feed.table)
            stepper.run([past], rows(feed.start, stepper.shape, seed + i))


def random_step(rng: random.Random, isa: str, dtype: str) -> tuple[Stepper, list[Feed]]:
    heads, kv_heads = rng.choice([(1, 1), (3, 1), (4, 4), (6, 2), (8, 4), (7, 1)])
    dim = rng.choice([8, 32, 48, 64, 80, 128, 256])
    causal = rng.random() < 0.85
    shape = Shape(
        heads,
        kv_heads,
        dim,
        window=rng.choice([0, 0, 0, 1, 5, 16, 70, 300]),
        softcap=rng.choice([0.0, 0.0, 2.0]),
        causal=causal,
        sinks=[rng.uniform(-2, 2) for _ in range(heads)] if rng.random() < 0.3 else [],
        q_norm=[rng.uniform(0.5, 1.5) for _ in range(dim)] if rng.random() < 0.4 else [],
        k_norm=[rng.uniform(0.5, 1.5) for _ in range(dim)] if rng.random() < 0.4 else [],
        rope_dim=rng.choice([0, dim, dim // 2]),
        interleaved=rng.random() < 0.3,
    )
    feeds = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        nodes = rng.choice([0, 0, 1, 6, 20]) if causal else 0
        parents = [rng.randrange(-1, i) for i in range(nodes)]
        start = rng.choice([0, 1, 15, 16, 17, 63, 64, 100, 255, 256, 300, 600]) if causal else 0
        feeds.append(Feed(start, rng.choice([1, 1, 2, 15, 16, 17, 33]), parents))
    block_size = rng.choice([16, 16, 32])
    made, blocks = tables(rng, [feed.start + feed.rows for feed in feeds], block_size)
    for feed, table in zip(feeds, made, strict=True):
        feed.table = table
    return Stepper(shape, blocks, dtype, isa, THREADS[rng.choice([1, 2])], block_size), feeds


@pytest.mark.parametrize("cases", [5, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_steps_against_float64(isa, dtype, cases):
    rng = random.Random(f"{isa} {dtype}")
    for case in range(cases):
        stepper, feeds = random_step(rng, isa, dtype)
        fill(stepper, feeds, case)
        x = rows(sum(feed.rows for feed in feeds), stepper.shape, 100 + case)
        out = torch.from_numpy(stepper.run(feeds, x)).double()
        wanted = reference(stepper, feeds, x)
        assert (out - wanted).abs().max() < TOLERANCE[dtype] * max(1.0, float(wanted.abs().max())), stepper.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_edges_of_blocks_and_splits_against_float64(isa, dtype):
    """Nothing before, one token, up to the last of a block or a split, one more; one row and a few, all in one step."""
    starts = [0, 1, *(edge + more for edge in (16, 32, 64, module.KV_SPLIT, 2 * module.KV_SPLIT) for more in (-1, 0, 1))]
    for shape in (Shape(3, 1, 64), Shape(4, 2, 8, window=17)):
        feeds = [Feed(start, count) for start in starts for count in (1, 3)]
        made, blocks = tables(random.Random(0), [feed.start + feed.rows for feed in feeds], 16)
        for feed, table in zip(feeds, made, strict=True):
            feed.table = table
        stepper = Stepper(shape, blocks, dtype, isa, THREADS[2])
        fill(stepper, feeds, 0)
        x = rows(sum(feed.rows for feed in feeds), shape, 1)
        out = torch.from_numpy(stepper.run(feeds, x)).double()
        wanted = reference(stepper, feeds, x)
        assert (out - wanted).abs().max() < TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize(
    "splits", [(3, 70), *(pytest.param(each, marks=pytest.mark.slow) for each in ((5, -1), (5, 0), (9, 70)))]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_context_over_many_splits(isa, dtype, splits):
    """`splits`: how many the context fills, and the tokens after them."""
    shape, start = Shape(6, 2, 64), module.KV_SPLIT * splits[0] + splits[1]
    (table,), blocks = tables(random.Random(1), [start + 3], 16)
    stepper = Stepper(shape, blocks, dtype, isa, THREADS[2])
    feeds = [Feed(start, 3, (), table)]
    fill(stepper, feeds, start)
    x = rows(3, shape, 5)
    out = torch.from_numpy(stepper.run(feeds, x)).double()
    assert stepper.step.items(shape.options(1)) > shape.kv_heads  # really cut, and merged
    assert (out - reference(stepper, feeds, x)).abs().max() < TOLERANCE[dtype]


def test_instruction_sets_with_one_order_of_sums_have_the_same_bits():
    """All that share K/V and continue each other's outputs. Control: K/V in bfloat16 has other bits in each other order."""
    shape, start = Shape(6, 2, 64), 300
    (table,), blocks = tables(random.Random(1), [start + 3], 16)
    x, bits = rows(3, shape, 5), {}
    for dtype, one in itertools.product(DTYPES, ISAS):
        stepper = Stepper(shape, blocks, dtype, one, THREADS[2])
        fill(stepper, [feed := Feed(start, 3, (), table)], 7)
        bits.setdefault((dtype, core.order_of_sums(one)), set()).add(stepper.run([feed], x).tobytes())
    assert all(len(found) == 1 for found in bits.values())
    orders = [order for dtype, order in bits if dtype == "bf16" and order != "amx"]  # AMX: other bits of linear layers alone
    assert len(set.union(*(bits["bf16", order] for order in orders))) == len(orders)


@pytest.mark.parametrize("signs", ["same", "opposite", "mixed"])
def test_int8_sums_of_512_dimensions_at_their_extremes(isa, signs):
    """Every query and key number is the largest of its group: 512 * 255 * 127 * 128, which just fits 32 bits."""
    shape, n = Shape(2, 1, 512), 70
    rng = np.random.default_rng(0)
    sign = np.where(rng.random((n, 4, 512)) < 0.5, -1, 1) if signs == "mixed" else np.ones((n, 4, 512))
    if signs == "opposite":
        sign[:, :2] = -1
    x = (0.05 * sign).reshape(n, -1).astype(np.float32)
    x[::3] *= np.float32(0.5)  # values and scores that differ
    table = list(range(5))
    stepper = Stepper(shape, 5, "int8", isa, THREADS[1])
    out = torch.from_numpy(stepper.run([Feed(0, n, (), table)], x)).double()
    wanted = reference(stepper, [Feed(0, n, (), table)], x)
    assert (out - wanted).abs().max() < 1e-4 * wanted.abs().max()
    past_32_bits = 512 * 255 * 127 * 128 + 2**26  # the control: 2 % more would wrap
    assert np.int64(past_32_bits).astype(np.int32) < 0
    with pytest.raises(ValueError, match="512"):
        module.KVPool(1, 1, 16, 1, 528, "int8")
    with pytest.raises(ValueError, match="int4 KV takes heads of up to 512"):
        module.KVPool(1, 1, 16, 1, 528, "int4")


@pytest.mark.parametrize("place", ["k", "v"])
def test_an_infinite_range_gives_nan_rows(isa, place):
    """Of int4: as torch's, their scale is infinite, and what reads them no number."""
    shape = VARIANTS["plain"]
    x = rows(40, shape, 0)
    at = x.shape[1] - shape.kv_heads * shape.dim * (1 if place == "v" else 2)
    x[23, at : at + 2] = 3e38, -3e38
    assert to_int4(torch.from_numpy(x[23, at : at + shape.dim])[None, None]).isnan().all()
    out = Stepper(shape, 8, "int4", isa, THREADS[1]).run([Feed(0, 40, (), [1, 2, 0])], x).reshape(40, -1, shape.dim)
    readers = out.shape[1] // shape.kv_heads
    assert np.isnan(out[23:, :readers]).any(axis=2).all()
    assert np.isfinite(out[:, readers:]).all()


def test_the_pool_stores_the_rounded_k_and_v(isa):
    """K after norm and rotation, V as it is: rounded to bfloat16, or to 8 or 4 bits with scales per token and head."""
    shape = Shape(4, 2, 48, k_norm=[0.5 + i / 48 for i in range(48)], rope_dim=32)
    feed = Feed(0, 37, (), [2, 0, 3])
    x = rows(37, shape, 0)
    _, k, v = shape.split(x)
    k, v = shape.prepared(k, shape.k_norm, feed.positions), torch.from_numpy(v.copy()).double().view(37, 2, 48)
    for dtype in DTYPES:
        stepper = Stepper(shape, 4, dtype, isa, THREADS[1])
        stepper.run([feed], x)
        held_k, held_v = stepper.stored(feed, 37)
        if dtype == "int8":
            for held, given in ((held_k, k), (held_v, v)):
                assert ((held - given).abs() <= given.abs().amax(-1, keepdim=True) / 254 * 1.001).all()  # type: ignore[attr-defined]
        elif dtype == "int4":
            for held, given, wanted in ((held_k, k, to_int4(k, 2)), (held_v, v, to_int4(v))):
                assert (held - given).abs().max() < 0.04 * (given.amax(-1) - given.amin(-1)).max()  # type: ignore[attr-defined]
                assert torch.isclose(held, wanted, rtol=0, atol=1e-5).double().mean() > 0.999  # but for ties
        elif dtype == "bf16":
            assert torch.equal(held_v, v.bfloat16().double())  # type: ignore[attr-defined]
            assert torch.equal(held_k, held_k.bfloat16().double())
            assert ((held_k - k).abs() <= k.abs() / 256).all()  # type: ignore[attr-defined]
        else:
            assert torch.equal(held_v, v)
            assert torch.allclose(held_k, k, rtol=0, atol=1e-6)


VARIANTS = {
    "plain": Shape(6, 2, 64),
    "biased": Shape(4, 2, 32, bias=np.linspace(-4, 4, 4 * 41, dtype=np.float32).reshape(4, 41)),
    "window": Shape(3, 1, 32, window=90, rope_dim=32),
    "capped": Shape(4, 4, 80, softcap=3.0, sinks=[0.5, -1.0, 0.0, 2.0]),
}


def one_shot(shape: Shape, dtype: str, isa: str, x: np.ndarray) -> np.ndarray:
    table = list(range(-(-len(x) // 16)))
    return Stepper(shape, len(table), dtype, isa, THREADS[1]).run([Feed(0, len(x), (), table)], x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rows_bits_do_not_depend_on_chunking_batch_tables_or_threads(isa, dtype, variant):
    shape, rng = VARIANTS[variant], random.Random(7)
    lengths = [330, 70, 17]
    x = [rows(n, shape, i) for i, n in enumerate(lengths)]
    wanted = [one_shot(shape, dtype, isa, part) for part in x]
    for threads in (1, 2):
        made, blocks = tables(rng, lengths, 16)
        stepper = Stepper(shape, blocks, dtype, isa, THREADS[threads])
        done = [0, 0, 0]
        while done != lengths:
            feeds, parts = [], []
            for i, n in enumerate(lengths):
                count = min(n - done[i], rng.choice([1, 1, 2, 7, 33, 64]))
                if count and rng.random() < 0.8:
                    feeds.append(Feed(done[i], count, (), made[i]))
                    parts.append((i, done[i], count))
                    done[i] += count
            if not feeds:
                continue
            out = stepper.run(feeds, np.concatenate([x[i][at : at + count] for i, at, count in parts]))
            for i, at, count in parts:
                assert np.array_equal(out[:count], wanted[i][at : at + count])
                out = out[count:]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_for_every_number_of_rows(isa, dtype):
    shape = VARIANTS["plain"]
    x = rows(280 + 33, shape, 3)
    wanted = one_shot(shape, dtype, isa, x)
    table = list(range(-(-len(x) // 16)))
    stepper = Stepper(shape, len(table), dtype, isa, THREADS[2])
    stepper.run([Feed(0, 280, (), table)], x[:280])
    for count in range(1, 34):  # each run stores the same K and V again
        part = slice(280, 280 + count)
        assert np.array_equal(stepper.run([Feed(280, count, (), table)], x[part]), wanted[part]), count


def test_sums_in_another_order_have_other_bits(isa):
    """Control of the equalities of bits: the same sums in another order differ, if only in the last places."""
    shape = Shape(2, 1, 64, causal=False)
    x = rows(600, shape, 0)
    forth, back = one_shot(shape, "f32", isa, x), one_shot(shape, "f32", isa, x[::-1].copy())[::-1]
    assert np.abs(forth - back).max() < 1e-5
    assert not np.array_equal(forth, back)


class Reordered(Stepper):
    """Feeds of more than eight rows meet tokens 0 and 17 in each other's place: the same sums, in another order."""

    def run(self, feeds: Sequence[Feed], x: np.ndarray, **also: np.ndarray) -> np.ndarray:
        size = self.pool.block_size
        for feed in feeds:
            if feed.rows > 8 and feed.start > 17:
                one, other = feed.table[0] * size, feed.table[17 // size] * size + 17 % size
                self.pool.move([(one, other), (other, one)])
        return super().run(feeds, x, **also)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_with_a_row_dependent_order_fails(isa, dtype, monkeypatch):
    """Control of the equalities of bits above: that order for some numbers of rows, within what float64 allows."""
    monkeypatch.setitem(globals(), "Stepper", Reordered)
    (table,), blocks = tables(random.Random(2), [320], 16)
    shape, feed = VARIANTS["plain"], Feed(300, 9, (), table)
    stepper, x = Reordered(shape, blocks, dtype, isa, THREADS[1]), rows(309, shape, 4)
    stepper.run([Feed(0, 300, (), table)], x[:300])
    out = torch.from_numpy(stepper.run([feed], x[300:])).double()
    assert (out - reference(stepper, [feed], x[300:])).abs().max() < TOLERANCE[dtype]
    with pytest.raises(AssertionError, match="9"):
        test_a_rows_bits_for_every_number_of_rows(isa, dtype)
    with pytest.raises(AssertionError, match="array_equal"):
        test_a_rows_bits_do_not_depend_on_chunking_batch_tables_or_threads(isa, dtype, "plain")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draft_node_has_the_bits_of_its_path(isa, dtype):
    """Any tree: what a node gets is what its path would get as known tokens, to the last bit."""
    rng = random.Random(5)
    for variant, start in [("plain", 250), ("window", 62), ("capped", 14), ("plain", 0)]:
        shape = VARIANTS[variant]
        nodes = 24
        parents = [rng.randrange(-1, i) if rng.random() < 0.5 else i - 1 for i in range(nodes)]
        feed = Feed(start, 2, parents)
        (feed.table,), blocks = tables(rng, [start + feed.rows], 16)
        stepper = Stepper(shape, blocks, dtype, isa, THREADS[2])
        past, x = rows(start, shape, 1), rows(feed.rows, shape, 2)
        if start:
            stepper.run([Feed(0, start, (), feed.table)], past)
        out = stepper.run([feed], x)
        for node, mask in enumerate(tree(parents)[1]):
            path = [i for i in range(nodes) if mask >> i & 1]
            line = np.concatenate([past, x[:2], x[[2 + i for i in path]]])
            assert np.array_equal(out[2 + node], one_shot(shape, dtype, isa, line)[-1])


def test_sixty_four_nodes_and_no_more():
    shape = Shape(2, 1, 32)
    feed = Feed(5, 1, [-1] * 64, range(5))
    stepper = Stepper(shape, 5, "f32", ISAS[0], THREADS[1])
    x = rows(feed.rows, shape, 0)
    assert (torch.from_numpy(stepper.run([feed], x)).double() - reference(stepper, [feed], x)).abs().max() < 1e-5
    with pytest.raises(ValueError, match="at most 64 nodes"):
        begin_nodes(stepper, [1 << i % 64 for i in range(65)])
    with pytest.raises(ValueError, match="names itself and nodes before it"):
        begin_nodes(stepper, [1, 1])
    with pytest.raises(ValueError, match="or all nodes"):
        begin_nodes(stepper, [2, 3])
    begin_nodes(stepper, [3, 3])


def begin_nodes(stepper: Stepper, masks: list[int]) -> None:
    """A step of one feed: a known token, then nodes with these masks."""
    n = 1 + len(masks)
    one, starts, blocks = (np.array(values, dtype=np.int32) for values in ([1], [0, n], [[0, 1, 2, 3, 4]]))
    stepper.step.begin(np.arange(n, dtype=np.int32), starts, one, one, blocks, np.array([0, *masks], np.uint64))


def test_a_mask_that_is_ignored_is_seen(isa):
    """Control: siblings that attend to each other give something else, far outside the tolerance."""
    shape = Shape(3, 1, 64)
    feed = Feed(20, 1, [-1, -1, 0, 1, 1], [0, 1])
    stepper = Stepper(shape, 2, "bf16", isa, THREADS[1])
    fill(stepper, [feed], 0)
    x = rows(feed.rows, shape, 1)
    out = torch.from_numpy(stepper.run([feed], x)).double()
    assert (out - reference(stepper, [feed], x)).abs().max() < TOLERANCE["bf16"]
    assert (out - reference(stepper, [feed], x, ignore_paths=True)).abs().max() > 10 * TOLERANCE["bf16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_of_another_request_does_not_leak(isa, dtype):
    """Blocks come back with anything in them, NaN included; weights of 0 times NaN must not be added up."""
    shape = Shape(3, 1, 64, window=40)
    x = rows(70, shape, 0)
    table = [3, 0, 4, 1, 2]
    clean, dirty = (Stepper(shape, 5, dtype, isa, THREADS[1]) for _ in range(2))
    dirty.run([Feed(0, 80, (), [0, 1, 2, 3, 4])], np.full((80, x.shape[1]), np.nan, dtype=np.float32))
    for start, count in [(0, 20), (20, 1), (21, 12), (33, 37)]:
        feed = Feed(start, count, (), table)
        part = x[start : start + count]
        out = dirty.run([feed], part)
        assert np.isfinite(out).all()
        assert np.array_equal(out, clean.run([feed], part))


@pytest.mark.parametrize("value", [np.nan, np.inf, np.float32(3.4e38)])  # the last is infinite as bfloat16, no range of int4
@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_a_broken_token_are_nan_and_no_others(isa, dtype, place, value):
    """A finite number would be a wrong answer that nothing reveals. Rows before the token keep their bits."""
    shape = VARIANTS["plain"]
    x = rows(40, shape, 0)
    feed = Feed(0, 40, (), [1, 2, 0])
    whole = Stepper(shape, 8, dtype, isa, THREADS[1]).run([feed], x).reshape(40, -1, shape.dim)
    width = shape.kv_heads * shape.dim
    at = -width if place == "v" else -2 * width
    x[23, at : at + 2] = value, -value
    out = Stepper(shape, 8, dtype, isa, THREADS[1]).run([feed], x).reshape(40, -1, shape.dim)
    readers = out.shape[1] // shape.kv_heads
    # Scores of an infinite key may be -inf, whose weight is 0.
    if np.isnan(value) or (place == "v" and (dtype in ("bf16", "int4") or np.isinf(value))):
        assert np.isnan(out[23:, :readers]).any(axis=2).all()
    assert np.array_equal(out[:, readers:], whole[:, readers:])
    assert np.array_equal(out[:23], whole[:23])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rejected_draft_leaves_no_nan(isa, dtype):
    """A sequence goes on from token 5 after a draft whose tokens 7 and 9 are broken, and after one that is not: same bits.
    The control: a row that sees token 7."""
    shape = VARIANTS["plain"]
    x, table = rows(12, shape, 0), [2, 0]
    width = shape.kv_heads * shape.dim
    outs = []
    for broken in (False, True):
        stepper, drafted = Stepper(shape, 4, dtype, isa, THREADS[1]), x[:11].copy()
        if broken:
            drafted[9, -width:] = np.nan
            drafted[7, -width + 1] = np.inf
        stepper.run([Feed(0, 5, (), table)], x[:5])
        tree = stepper.run([Feed(5, 0, (-1, -1, -1, 1, 0, 4), table)], drafted[5:])
        after = [stepper.run([Feed(5, 1, (), table)], x[11:12]), stepper.run([Feed(6, 1, (), table)], x[10:11])]
        outs.append([tree[0], tree[1], tree[3], *after, tree[2]])
    for clean, dirty in zip(outs[0][:-1], outs[1][:-1], strict=True):
        assert np.array_equal(clean, dirty)
    assert np.isnan(outs[1][-1]).any()


@pytest.mark.parametrize("window", [2**31 - 1, 2**31 - 8, 2**31 - 64, 1 << 20])
def test_a_window_longer_than_any_sequence_has_no_effect(isa, window):
    shape, x = VARIANTS["plain"], rows(20, VARIANTS["plain"], 0)
    for threads in THREADS.values():
        wide = Stepper(replace(shape, window=window), 2, "bf16", isa, threads)
        every = Stepper(shape, 2, "bf16", isa, threads)
        for start, count in [(0, 19), (19, 1)]:
            feed, part = [Feed(start, count, (), [0, 1])], x[start : start + count]
            assert np.array_equal(wide.run(feed, part), every.run(feed, part))


def test_a_pool_beyond_64_bit_sizes_is_refused():
    with pytest.raises(ValueError, match="larger than memory can be"):
        module.KVPool(1, 2**27 - 1, 16, 65536, 65536)
    with pytest.raises(ValueError, match="larger than memory can be"):
        module.KVPool.block_bytes(1 << 30, 1 << 30, 65536, 65536, "f32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_and_moves(isa, dtype):
    """A block copied serves as its original; a path moved into line serves as if it had been stored there."""
    shape = VARIANTS["plain"]
    x = rows(40, shape, 0)
    wanted = one_shot(shape, dtype, isa, x)
    stepper = Stepper(shape, 8, dtype, isa, THREADS[1])
    stepper.run([Feed(0, 20, (), [1, 2])], x[:20])
    stepper.pool.copy_blocks([(1, 6), (2, 7)])
    assert np.array_equal(stepper.run([Feed(20, 1, (), [6, 7])], x[20:21]), wanted[20:21])
    # siblings 0 and 1, and the child of 1: the path is (1, 2)
    tree_rows = np.concatenate([rows(1, shape, 9), x[21:23]])
    out = stepper.run([Feed(21, 0, [-1, -1, 1], [6, 7])], tree_rows)
    assert np.array_equal(out[1:], wanted[21:23])
    at = 7 * 16 + 5
    stepper.pool.move([(at + 1, at), (at + 2, at + 1)])  # the second reads what the first may not have overwritten
    assert np.array_equal(stepper.run([Feed(23, 1, (), [6, 7])], x[23:24]), wanted[23:24])
    moved = stepper.stored(Feed(0, 0, (), [6, 7]), 23)
    original = Stepper(shape, 2, dtype, isa, THREADS[1])
    original.run([Feed(0, 23, (), [0, 1])], x[:23])
    for held, given in zip(moved, original.stored(Feed(0, 0, (), [0, 1]), 23), strict=True):
        assert torch.equal(held, given)
    with pytest.raises(IndexError, match="outside the pool"):
        stepper.pool.move([(0, 128)])


SOURCES = (1, 15, 16, 17, 255, 256, 300, 600)


def readers(isa: str, dtype: str, threads: int = 2) -> tuple[Stepper, list[Feed], np.ndarray]:
    """Feeds of one and more rows that read sources of many lengths; the longest three times. Blocks of nobody hold NaN."""
    plain, shape = Shape(4, 2, 32), Shape(4, 2, 32, source=True)
    feeds = [Feed(9, 1 + which % 3, (), (), source) for which, source in enumerate((*SOURCES, 600, 600))]
    made, blocks = tables(random.Random(3), [feed.source for feed in feeds[: len(SOURCES)]], 16)
    own = tuple(range(blocks, blocks + 1))  # nothing is stored in it, or read
    stepper = Stepper(plain, blocks + 1, dtype, isa, THREADS[threads])
    everywhere = Feed(0, 16 * (blocks + 1), (), range(blocks + 1))
    stepper.run([everywhere], np.full((everywhere.known, 8 * 32), np.nan, np.float32))
    for number, (feed, table) in enumerate(zip(feeds, [*made, made[-1], made[-1]], strict=True)):
        feed.table, feed.source_table = own, table
        if number < len(SOURCES):
            stepper.run([Feed(0, feed.source, (), table)], rows(feed.source, plain, number))
    stepper.shape = shape
    return stepper, feeds, rows(sum(feed.rows for feed in feeds), shape, 9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_read_all_of_a_source(isa, dtype):
    """Whatever its length, and bit for bit what they read alone, also where several read the same blocks."""
    stepper, feeds, x = readers(isa, dtype)
    out, at = stepper.run(feeds, x), 0
    wanted = reference(stepper, feeds, x)
    assert (torch.from_numpy(out).double() - wanted).abs().max() < TOLERANCE[dtype]
    for feed in feeds:
        part = slice(at, at + feed.rows)
        assert np.array_equal(stepper.run([feed], x[part]), out[part]), feed.source
        at += feed.rows
    less = [Feed(feed.start, feed.known, (), feed.table, max(1, feed.source - 1), feed.source_table) for feed in feeds]
    short = reference(stepper, less, x)  # the control: one token that is not read is seen
    assert ((short - wanted).abs().amax(1) > TOLERANCE["f32"]).sum() > len(x) - 3


def test_a_feed_without_a_source_is_refused():
    stepper, feeds, x = readers(ISAS[0], "f32")
    for length, words in ((0, "a feed has none"), (10_000, "longer than its table")):
        feeds[1].source = length
        with pytest.raises((ValueError, IndexError), match=words):
            stepper.run(feeds, x)


BIAS = np.random.default_rng(1).standard_normal((6, 2 * 37 + 1)).astype(np.float32) * 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_distances_add_to_scores(isa, dtype, causal):
    """Near, as far as there are numbers, and farther; of known tokens, of a draft's nodes by their depth, both ways."""
    shape = Shape(6, 2, 48, causal=causal, bias=BIAS)
    feeds = [Feed(0, 90), Feed(0, 3)] if not causal else [Feed(0, 90), Feed(300, 2, [-1, -1, 0, 1, 3]), Feed(36, 1), Feed(0, 1)]
    made, blocks = tables(random.Random(0), [feed.start + feed.rows for feed in feeds], 16)
    for feed, table in zip(feeds, made, strict=True):
        feed.table = table
    stepper = Stepper(shape, blocks, dtype, isa, THREADS[2])
    fill(stepper, feeds, 0)
    x = rows(sum(feed.rows for feed in feeds), shape, 1)
    out = torch.from_numpy(stepper.run(feeds, x)).double()
    wanted = reference(stepper, feeds, x)
    assert (out - wanted).abs().max() < TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()))
    for wrong in (None, np.pad(BIAS, ((0, 0), (300, 300)))):  # the controls: nothing added; nothing beyond the last distance
        stepper.shape = Shape(6, 2, 48, causal=causal, bias=wrong)
        assert (out - reference(stepper, feeds, x)).abs().max() > 10 * TOLERANCE[dtype]


A8_BLOCK = np.dtype([("q", "i1", 64), ("scale", "f4", 2), ("sum", "f4", 2), ("neg32", "i4", 2), ("neg16", "i4", 4)])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (3, 1, 32), (5, 5, 96)])
def test_the_result_is_rounded_to_the_input_type_of_the_next_layer(isa, heads, kv_heads, dim):
    """int8 or bfloat16, rounded where it was computed: the bytes that rounding the float32 rows gives."""
    shape = Shape(heads, kv_heads, dim)
    tiles = -(-heads * dim // 64)
    blocks, halves = np.full((5, tiles * A8_BLOCK.itemsize), 255, np.uint8), np.full((5, tiles * 64), 255, np.uint16)
    stepper = Stepper(shape, 1, "bf16", isa, THREADS[1])
    out = stepper.run([Feed(0, 5, (), [0])], rows(5, shape, 1), a8=blocks, bf16=halves)
    parts = module.quantize_a8(out, isa=isa)
    for name, wanted in zip(A8_BLOCK.names, parts, strict=True):
        assert np.array_equal(blocks.view(A8_BLOCK)[name].reshape(5, -1), wanted)
    padded = torch.nn.functional.pad(torch.from_numpy(out), (0, tiles * 64 - heads * dim))
    assert np.array_equal(halves.view(np.int16), padded.bfloat16().view(torch.int16).numpy())


@pytest.mark.parametrize("window", [0, 4, 30])
def test_the_same_as_the_torch_op(isa, window):
    """The op's torch body is its meaning: same feeds, same tables, same draft trees."""
    shape = Shape(4, 2, 32, window=window)
    config = ModelConfig("llama", 10, 128, (LayerConfig(4, 2, 32, 64),), 512)
    rng = random.Random(window)
    feeds = [Feed(0, 21), Feed(0, 5, [-1, 0, 0, 1]), Feed(0, 1), Feed(0, 40, [-1, -1, 0, 1, 2])]
    made, blocks = tables(rng, [feed.rows for feed in feeds], 16)
    for feed, table in zip(feeds, made, strict=True):
        feed.table = table
    x = rows(sum(feed.rows for feed in feeds), shape, 1)
    pool = KVPool(config, blocks, 16, torch.float64)
    ctx = build(pool, [FeedRows([0] * feed.known, feed.table, 0, [0] * len(feed.parents), feed.parents) for feed in feeds])
    wanted = attention(*(torch.from_numpy(part.copy()).double() for part in shape.split(x)), ctx, 0, window=window or None)  # type: ignore[call-arg]
    out = Stepper(shape, blocks, "f32", isa, THREADS[2]).run(feeds, x)
    assert (torch.from_numpy(out).double() - wanted).abs().max() < 1e-5


def test_a_feed_longer_than_its_table_is_refused():
    shape = Shape(2, 1, 32)
    stepper = Stepper(shape, 4, "bf16", ISAS[0], THREADS[1])
    with pytest.raises(IndexError, match="longer than its table"):
        stepper.begin([Feed(30, 3, (), [0, 1])])
    with pytest.raises(IndexError, match="block outside the pool"):
        stepper.begin([Feed(30, 1, (), [0, 4])])
    with pytest.raises(ValueError, match="multiple of 16"):
        module.KVPool(1, 4, 8, 1, 32)
    with pytest.raises(ValueError, match="unknown KV type"):
        module.KVPool(1, 4, 16, 1, 32, "fp8")
