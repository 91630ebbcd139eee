"""Packed weights hold exactly what the file holds: unpacked, they are bit for bit the dequantised values."""

import numpy as np
import pytest

from headrace import core
from headrace.weights.kinds import KINDS, NOT_GGUF
from tests.native_blocks import FLOAT_KINDS, INTEGER_KINDS, columns, dense, float_rows, random_rows, round_bf16

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

module = core.module()
ISAS = module.cpu_info()["isas"]
QUANTS = pytest.importorskip("gguf.quants", reason="the oracle of stored blocks is the gguf package (extra dev)")


@pytest.fixture
def arena():
    return module.Arena(1 << 21)


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)


def test_every_kind_the_loader_knows_is_tested_here() -> None:
    assert {*INTEGER_KINDS, *FLOAT_KINDS} == set(KINDS)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", INTEGER_KINDS)
def test_integers_and_scales_are_preserved(kind: str, isa: str, pool, arena) -> None:
    for n in (1, 16, 37):
        for k in columns(kind):
            rows = random_rows(kind, n, k)
            packed = module.pack(rows, kind, n, k, arena, pool, isa=isa)
            assert (packed.kind, packed.n, packed.k) == (kind, n, k)
            for reader in (isa, ISAS[0]):  # the bytes are the same on all
                assert np.array_equal(bits(packed.unpack(isa=reader)), bits(dense(rows, kind, k)))


@pytest.mark.parametrize("kind", [kind for kind in INTEGER_KINDS if kind not in NOT_GGUF])
def test_the_gguf_package_reads_the_same(kind: str, pool, arena) -> None:
    k = columns(kind)[-1]
    rows = random_rows(kind, 5, k, seed=1)
    oracle = QUANTS.dequantize(rows, getattr(QUANTS.GGMLQuantizationType, kind))
    assert np.array_equal(module.pack(rows, kind, 5, k, arena, pool).unpack(), oracle)


@pytest.mark.parametrize("kind", INTEGER_KINDS)
def test_every_byte_counts(kind: str, pool, arena) -> None:
    """The control: a packing that dropped a byte of the source would pass the tests above on data without it."""
    k = columns(kind)[0]
    rows = random_rows(kind, 1, k, scales=np.array([0.5, 1.0, 2.0]))
    before = module.pack(rows, kind, 1, k, arena, pool).unpack()
    for at in range(rows.shape[1]):
        changed = rows.copy()
        changed[0, at] ^= 0x11
        assert not np.array_equal(bits(module.pack(changed, kind, 1, k, arena, pool).unpack()), bits(before)), f"byte {at}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FLOAT_KINDS)
def test_floats_become_bfloat16(kind: str, isa: str, pool, arena) -> None:
    special = np.array(
        [[0.0, -0.0, 1e-40, -1e-45, 65504.0, 1.00390625, 1.01171875, 3e38 if kind == "F32" else 3e4]], np.float32
    )
    for n, k in ((1, 1), (37, 172), (16, 64)):
        rows = random_rows(kind, n, k)
        exact = dense(rows, kind, k)
        assert np.array_equal(module.pack(rows, kind, n, k, arena, pool, isa=isa).unpack(), round_bf16(exact))
    rows = float_rows(kind, special)
    packed = module.pack(rows, kind, 1, 8, arena, pool, isa=isa).unpack()
    assert np.array_equal(bits(packed), bits(round_bf16(dense(rows, kind, 8))))


def test_values_that_are_not_finite_stay_so(pool, arena) -> None:
    rows = float_rows("F32", np.array([[np.nan, np.inf, -np.inf, 1.0]], np.float32))
    for isa in ISAS:
        packed = module.pack(rows, "F32", 1, 4, arena, pool, isa=isa).unpack()
        assert np.isnan(packed[0, 0])
        assert packed[0, 1:].tolist() == [np.inf, -np.inf, 1.0]


def int8_reference(w: np.ndarray) -> np.ndarray:
    groups = w.reshape(len(w), -1, 32)
    scale = (np.abs(groups).max(-1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    inverse = np.where(scale > 0, np.float32(1) / np.where(scale > 0, scale, 1), 0).astype(np.float32)
    return (np.rint(np.clip(groups * inverse, -127, 127)) * scale).reshape(w.shape)


def int4_reference(w: np.ndarray) -> np.ndarray:
    groups = w.reshape(len(w), -1, 32)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    best, least = np.zeros_like(groups), np.full(groups.shape[:2], np.inf, np.float32)
    for step in range(13):
        scale = (extreme / np.float32(-(7 + 0.125 * step))).astype(np.float16).astype(np.float32)
        inverse = np.where(scale != 0, np.float32(1) / np.where(scale != 0, scale, 1), 0).astype(np.float32)
        trial = np.rint(np.clip(groups * inverse, -8, 7)) * scale
        error = ((groups - trial) ** 2).sum(-1)
        better = error < least * (1 - 1e-6)  # sums in another order: ties may fall either way
        best[better], least[better] = trial[better], error[better]
    return best.reshape(w.shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("source", FLOAT_KINDS)
def test_floats_quantised_at_load(source: str, isa: str, pool, arena) -> None:
    n, k = 37, 160
    rows = random_rows(source, n, k)
    w = dense(rows, source, k)
    packed = module.pack(rows, source, n, k, arena, pool, quantize="int8", isa=isa)
    assert packed.kind == "Q8_0"
    assert np.array_equal(packed.unpack(), int8_reference(w))
    packed = module.pack(rows, source, n, k, arena, pool, quantize="int4", isa=isa)
    assert packed.kind == "Q4_0"
    ours, reference = packed.unpack().reshape(n, -1, 32), int4_reference(w).reshape(n, -1, 32)
    errors = [((q - w.reshape(n, -1, 32)) ** 2).sum(-1) for q in (ours, reference)]
    assert np.allclose(*errors, rtol=1e-4)
    assert np.mean(np.all(ours == reference, axis=-1)) > 0.99


def test_int4_search_pays(pool, arena) -> None:
    """The control: the plain scale extreme / -8 leaves a larger error than the one that was searched for."""
    rows = random_rows("F32", 64, 512)
    w = dense(rows, "F32", 512)
    groups = w.reshape(64, -1, 32)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    plain = np.clip(np.rint(groups / (extreme / -8)), -8, 7) * (extreme / -8)
    searched = module.pack(rows, "F32", 64, 512, arena, pool, quantize="int4").unpack().reshape(groups.shape)
    assert ((searched - groups) ** 2).sum() < 0.95 * ((plain - groups) ** 2).sum()


def test_rows_are_packed_in_permuted_order(pool, arena) -> None:
    rows = random_rows("Q4_1", 40, 64)
    order = np.random.default_rng(0).permutation(40)[:21].astype(np.int32)
    packed = module.pack(rows, "Q4_1", 21, 64, arena, pool, permutation=order)
    assert np.array_equal(packed.unpack(), dense(rows, "Q4_1", 64)[order])
    assert np.array_equal(packed.unpack(rows=np.array([20, 0, 20], np.int32)), dense(rows, "Q4_1", 64)[order[[20, 0, 20]]])


def test_a_gated_pair_interleaves(pool, arena) -> None:
    gate, up = random_rows("Q4_K", 37, 256), random_rows("Q6_K", 37, 256)
    first, second = module.pack_pair(gate, "Q4_K", up, "Q6_K", 37, 256, arena, pool)
    assert np.array_equal(first.unpack(), dense(gate, "Q4_K", 256))
    assert np.array_equal(second.unpack(), dense(up, "Q6_K", 256))


@pytest.mark.parametrize("at_once", [1, 1 << 30])
def test_tensors_packed_together_equal_tensors_packed_alone(at_once: int, tmp_path, pool, arena) -> None:
    """Rows of a mapped file, in another order, with biases: also in parts, and what has been packed can be read again."""
    asked = [(kind, n, np.arange(n, dtype=np.float32)) for kind in INTEGER_KINDS for n in (5, 16, 8000)]
    stored = [random_rows(kind, n, 256) for kind, n, _ in asked]
    (tmp_path / "rows").write_bytes(b"".join(rows.tobytes() for rows in stored))
    file = np.memmap(tmp_path / "rows", np.uint8, "r")
    ends = np.cumsum([rows.size for rows in stored])
    mapped = [np.asarray(file[end - rows.size : end]).reshape(rows.shape) for end, rows in zip(ends, stored, strict=True)]
    packer, order = module.Packer(arena), np.random.default_rng(0).permutation
    orders = [order(n).astype(np.int32) for _, n, _ in asked]
    tensors = [
        packer.add(rows, kind, n, 256, permutation=order, bias=bias, mapped=True)
        for rows, order, (kind, n, bias) in zip(mapped, orders, asked, strict=True)
    ]
    runs = 0
    while packer.waiting:
        assert packer.run(pool, at_once) == []
        runs += 1
    assert runs == (len(asked) if at_once == 1 else 1)
    x = np.random.default_rng(1).standard_normal((1, 256), np.float32)
    for rows, again, order, tensor, (kind, n, bias) in zip(stored, mapped, orders, tensors, asked, strict=True):
        assert np.array_equal(rows, again)
        alone = module.pack(rows, kind, n, 256, arena, pool, permutation=order, bias=bias)
        assert np.array_equal(bits(tensor.unpack()), bits(alone.unpack()))
        assert np.array_equal(*(module.linear(module.PackedLinear([each]), x, pool) for each in (tensor, alone)))


def test_a_packer_names_tensors_that_are_not_finite(pool, arena) -> None:
    packer = module.Packer(arena)
    rows = [random_rows("Q8_0", 2000, 512) for _ in range(4)]
    rows[1][1999, -34:-32] = 0x00, 0x7C  # the last scale: infinite
    rows[3][0, :2] = 0x01, 0x7C  # the first one: NaN
    for each in rows[:2]:
        packer.add(each, "Q8_0", 2000, 512)
    packer.add_pair(rows[2], "Q8_0", rows[3], "Q8_0", 2000, 512)
    assert packer.run(pool, 1) == []
    assert packer.run(pool, 1 << 30) == [1, 3]


def test_rows_of_a_larger_array_are_read_in_place(pool, arena) -> None:
    wide = np.zeros((8, 100), np.uint8)
    rows = random_rows("Q8_0", 8, 32)
    wide[:, 10 : 10 + rows.shape[1]] = rows
    packed = module.pack(wide[:, 10 : 10 + rows.shape[1]], "Q8_0", 8, 32, arena, pool)
    assert np.array_equal(packed.unpack(), dense(rows, "Q8_0", 32))


def test_the_bits_per_weight_equal_the_table(pool, arena) -> None:
    stored = {
        "Q4_0": 4.5,
        "Q4_1": 5,
        "Q5_0": 5.5,
        "Q5_1": 6,
        "Q8_0": 8.5,
        "Q4_K": 4.625,
        "Q5_K": 5.625,
        "Q6_K": 6.625,
        "BF16": 16,
        "G4_32": 5,
        "G4_128": 4.25,
        "G8_32": 9,
        "G8_128": 8.25,
        "C8": 8 + 8 * 64 / (16 * 512),  # 64 bytes for the scales of 16 rows
    }
    for kind, per_weight in stored.items():
        before = arena.used
        packed = module.pack(random_rows(kind, 32, 512), kind, 32, 512, arena, pool)
        assert packed.nbytes == arena.used - before == 32 * 512 * per_weight / 8


@pytest.mark.parametrize("kind", [*INTEGER_KINDS, *FLOAT_KINDS])
def test_packed_bytes_predicts_the_size(kind: str, pool, arena) -> None:
    """Padding of rows and columns included: small and odd shapes, and what floats are made into."""
    for n in (1, 15, 16, 17, 100):
        for k in columns(kind):
            for quantize in ("", "int8", "int4") if kind in FLOAT_KINDS else ("",):
                before = arena.used
                packed = module.pack(random_rows(kind, n, k), kind, n, k, arena, pool, quantize=quantize)
                assert module.packed_bytes(kind, n, k, quantize) == packed.nbytes == arena.used - before
    with pytest.raises(ValueError, match=r"at most 2\^30"):
        module.packed_bytes(kind, 2**31 - 1, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "Q9_9"}, "no native kernels for weights of type Q9_9"),
        ({"k": 48}, "multiple of 32 columns, not 48"),
        ({"k": 96}, "bytes, not 36"),
        ({"n": 5}, "rows must hold n rows"),
        ({"n": 0}, "n and k must be positive"),
        ({"permutation": np.array([0, 1, 2, 4], np.int32)}, "names a row that is not there"),
        ({"quantize": "int8"}, "quantised already"),
        ({"bias": np.zeros(3, np.float32)}, "bias must have n entries"),
        ({"isa": "sse9"}, "unknown instruction set 'sse9'"),
    ],
)
def test_unsupported_arguments_are_refused(change: dict, message: str, pool, arena) -> None:
    asked = {"rows": random_rows("Q4_0", 4, 64), "kind": "Q4_0", "n": 4, "k": 64, "arena": arena, "pool": pool} | change
    with pytest.raises(ValueError, match=message) as caught:
        module.pack(**asked)
    assert len(str(caught.value).splitlines()) == 1
