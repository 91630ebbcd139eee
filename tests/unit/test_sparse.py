"""2:4: two of each four numbers with 2-bit indices, there and back; what it takes."""

from itertools import combinations
from math import ceil, log2

import numpy as np
import pytest
import torch

from headrace.compress.grids.encode import encode
from headrace.compress.grids.keep import keep_mask, parse_sparsity
from headrace.weights.kinds import KINDS
from headrace.weights.sparse import DENSE, INDICES, compacted, from_dense, indices_of, sparse_parts, sparse_rows, spread
from tests.native_blocks import dense, random_rows


def sparse_bytes(bits: float, kept: int = 2, of: int = 4) -> float:
    """Size of `kept` of each `of` numbers with their indices, relative to all numbers of `bits` bits."""
    return kept * (bits + ceil(log2(of))) / (of * bits)


def test_two_of_four_and_back() -> None:
    """All six patterns, and rows with more zeros than two of four; three of four are refused."""
    rng = np.random.default_rng(4)
    w = rng.integers(-8, 8, (10, 64)).astype(np.int8)
    w[~keep_mask(np.abs(w.astype(np.int32)), parse_sparsity("2:4"))] = 0
    w[3] = 0
    packed, indices = compacted(w)
    assert np.array_equal(spread(packed, indices), w)
    assert {*(indices & 15).ravel().tolist(), *(indices >> 4).ravel().tolist()} == set(INDICES.tolist())
    assert set(INDICES.tolist()) == {first | second << 2 for first, second in combinations(range(4), 2)}
    assert not np.array_equal(spread(packed, np.roll(indices, 1, axis=1)), w), "the control: other places"
    with pytest.raises(ValueError, match="more than two of four"):
        compacted(np.ones((1, 8)))
    with pytest.raises(ValueError, match="do not ascend"):
        spread(packed, np.zeros_like(indices))


def test_torch_finds_the_same_two_of_four() -> None:
    """The numbers and the 2-bit indices of torch's own packer for sparse tensor cores, once its words are in order again."""
    conversions = pytest.importorskip("torch.sparse._semi_structured_conversions", reason="this torch has no packer of 2:4")
    rng, (n, k) = np.random.default_rng(6), (32, 128)
    w = (rng.integers(1, 128, (n, k)) * rng.choice([-1, 1], (n, k))).astype(np.int8)
    w[~keep_mask(np.abs(w.astype(np.int32)), parse_sparsity("2:4"))] = 0
    packed, indices = compacted(w)
    theirs, words = conversions.sparse_semi_structured_from_dense_cutlass(torch.from_numpy(w))
    order = conversions._calculate_meta_reordering_scatter_offsets(n, k // 32, torch.int32, "cpu")
    assert np.array_equal(packed, theirs.numpy())
    assert np.array_equal(indices.view("<i4"), words.flatten()[order].view(n, -1).numpy())
    in_their_order = torch.empty_like(words.flatten()).scatter_(0, order, torch.from_numpy(indices.view("<i4")).flatten())
    back = conversions.sparse_semi_structured_to_dense_cutlass(torch.from_numpy(packed), in_their_order.view(n, -1))
    assert np.array_equal(back.numpy(), w)
    swapped = indices.view("<i4").copy()
    swapped[0, 0] ^= 0xFF
    assert not np.array_equal(swapped, words.flatten()[order].view(n, -1).numpy()), "the control: one index"


@pytest.mark.parametrize("kind", DENSE)
def test_rows_of_sparse_kinds_and_back(kind: str) -> None:
    rows = random_rows(kind, 5, 96)
    numbers, indices, scales = sparse_parts(kind, rows)
    assert np.array_equal(sparse_rows(kind, numbers, indices, scales), rows)
    values = spread(numbers, indices).astype(np.float32) * np.repeat(scales.astype(np.float32), 32, axis=1)
    assert np.array_equal(values, dense(rows, kind, 96))


@pytest.mark.parametrize(("kind", "other"), DENSE.items())
def test_dense_rows_that_are_two_of_four(kind: str, other: str) -> None:
    """The same numbers; rows that are not 2:4 are refused, and masks that are not."""
    w = np.random.default_rng(5).standard_normal((6, 64)).astype(np.float32)
    mask = keep_mask(np.abs(w), parse_sparsity("2:4"))
    rows = encode(np.where(mask, w, np.float32(0)), other)
    made = from_dense(kind, rows)
    assert np.array_equal(dense(made, kind, 64), dense(rows, other, 64))
    assert np.array_equal(spread(np.ones((6, 32), np.uint8), indices_of(mask)), mask)
    with pytest.raises(ValueError, match="more than two of four"):
        from_dense(kind, encode(w, other))
    mask[3, 5] = not mask[3, 5]
    with pytest.raises(ValueError, match="does not keep two of four"):
        indices_of(mask)


def test_sizes_of_two_of_four() -> None:
    """Of dense numbers, scales aside: 16 bits 0.5625, 8 bits 0.625, 4 bits 0.75; and that is what the kinds store."""
    assert [sparse_bytes(bits) for bits in (16, 8, 4)] == [0.5625, 0.625, 0.75]
    for sparse, whole, bits in (("S4", "Q4_0", 4), ("S8", "Q8_0", 8)):
        assert (KINDS[sparse].nbytes - 2) / (KINDS[whole].nbytes - 2) == sparse_bytes(bits)
