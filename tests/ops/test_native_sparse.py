"""2:4 in the native core: a layer gives, bit for bit, what the dense format of the same integers gives, on every path."""

import numpy as np
import pytest

from headrace import core
from headrace.weights.decode import dequantize_numpy
from headrace.weights.kinds import KINDS
from headrace.weights.schemes.rows import integer_rows
from headrace.weights.sparse import INDICES, sparse_parts, sparse_rows, spread
from tests.native_blocks import SPARSE, dense, random_rows

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

module = core.module()
ISAS = module.cpu_info()["isas"]
REVERSED = {0x4: 0xE, 0x8: 0xD, 0x9: 0x9, 0xC: 0xC, 0xD: 0x8, 0xE: 0x4}  # places counted from the other end
OTHERS = {0x4: 0xE, 0x8: 0xD, 0x9: 0xC, 0xC: 0x9, 0xD: 0x8, 0xE: 0x4}  # the two places that are not kept


def packed(rows: np.ndarray, kind: str, k: int, pool):
    return module.pack(rows, kind, len(rows), k, module.Arena(1 << 21), pool)


def as_dense(kind: str, rows: np.ndarray) -> np.ndarray:
    """Rows of the dense kind with the same integers and scales."""
    kept, indices, scales = sparse_parts(kind, rows)
    return integer_rows(SPARSE[kind], spread(kept, indices), scales)


def with_indices(kind: str, rows: np.ndarray, change: dict[int, int]) -> np.ndarray:
    kept, indices, scales = sparse_parts(kind, rows)
    table = np.array([change.get(low, 4) | change.get(high, 4) << 4 for high in range(16) for low in range(16)], np.uint8)
    return sparse_rows(kind, kept, table[indices], scales)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_is_dense_bit_for_bit(kind: str, isa: str, pool) -> None:
    """Few rows and many, ragged sizes, segments, added and gated and as logits. Controls: other places of the same numbers."""
    for n, k, unit in ((37, 352, 0), (16, 832, 64)):
        rows = random_rows(kind, n, k)
        variants = [as_dense(kind, rows), rows, *(with_indices(kind, rows, change) for change in (REVERSED, OTHERS))]
        kinds = (SPARSE[kind], kind, kind, kind)
        layers = [
            module.PackedLinear([packed(each, name, k, pool)], segment_unit=unit)
            for each, name in zip(variants, kinds, strict=True)
        ]
        for m in (1, 2, 3, 4, 5, 6, 7, 8, 41):
            x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
            for path in ("direct", "panels"):
                wanted, ours, *wrong = (module.linear(layer, x, pool, path=path, isa=isa) for layer in layers)
                assert np.array_equal(ours.view(np.uint32), wanted.view(np.uint32)), (m, path)
                assert not any(np.array_equal(each, wanted) for each in wrong)
            logits = [module.logits(layer, x, pool, isa=isa)[0] for layer in layers[:2]]
            assert np.array_equal(*logits)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", SPARSE)
def test_gated_sparse_layers(kind: str, isa: str, pool) -> None:
    """Gate and up, of which one may be dense."""
    n, k = 40, 96
    rows = [random_rows(kind, n, k, seed) for seed in (0, 1)]
    x = np.random.default_rng(0).standard_normal((9, k)).astype(np.float32)
    results = []
    for kinds in ((kind, kind), (SPARSE[kind], kind), (SPARSE[kind], SPARSE[kind])):
        stored = [each if name == kind else as_dense(kind, each) for each, name in zip(rows, kinds, strict=True)]
        pair = module.pack_pair(stored[0], kinds[0], stored[1], kinds[1], n, k, module.Arena(1 << 21), pool)
        results.append(module.gated(module.PackedLinear(list(pair), gated=True), x, pool, isa=isa))
    for other in results[1:]:
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(results[0], other, strict=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", SPARSE)
def test_all_patterns_in_all_rows(kind: str, isa: str, pool) -> None:
    """Every pattern in every place of a group and in every row of a tile, one at a time, its two numbers told apart."""
    k, places = 64, 16  # quads of a row
    for pattern in INDICES:
        kept = np.zeros((places, k // 2), np.int8)
        indices = np.full((places, places), 0x4, np.uint8)
        for row in range(places):
            kept[row, 2 * row : 2 * row + 2] = 3, -7
            indices[row, row] = pattern
        rows = sparse_rows(kind, kept, indices[:, ::2] | indices[:, 1::2] << 4, np.ones((places, 2), np.float16))
        for shift in range(16):
            moved = np.roll(rows, shift, axis=0)
            found = packed(moved, kind, k, pool).unpack(isa=isa)
            assert np.array_equal(found, dequantize_numpy(moved.reshape(-1), kind).reshape(16, k))
            first = int(np.flatnonzero(found[shift])[0])
            assert (first, found[shift, first]) == (pattern & 3, 3)


@pytest.mark.parametrize("kind", SPARSE)
def test_indices_that_do_not_ascend_are_refused(kind: str, pool) -> None:
    """As scales that are no numbers are: by the packer, and by whoever reads the values."""
    rows = random_rows(kind, 20, 64, scales=np.array([0.5]))
    rows[7, 3] = 0x44 ^ 0x41  # first and second place: the second one twice
    packer = module.Packer(module.Arena(1 << 21))
    packer.add(rows, kind, 20, 64)
    assert packer.run(pool, 1 << 30) == [0]
    assert np.isnan(dense(rows, kind, 64)).any(axis=1).tolist() == [row == 7 for row in range(20)]


def test_bytes_of_a_tile(pool) -> None:
    """3.5 and 5.5 bits a weight, those of 4.5 and 8.5 dense ones."""
    for kind, bits in (("S4", 3.5), ("S8", 5.5)):
        assert packed(random_rows(kind, 32, 512), kind, 512, pool).nbytes == 32 * 512 * bits / 8
        assert KINDS[kind].nbytes * 8 / KINDS[kind].block == bits
