"""Zero points in the native core. Of 4 bits a layer gives, bit for bit, what Q5_0 gives of the same integers; of 8 bits, whose
integers less a zero point have 9, what Q8_0 gives where the zero points are its own."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace import core
from headrace.weights.decode import dequantize_numpy
from headrace.weights.kinds import KINDS
from headrace.weights.schemes.rows import POINTS, WIDE, grouped_rows, integer_rows, row_integers
from tests.native_blocks import dense, random_rows

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

module = core.module()
ISAS = module.cpu_info()["isas"]


def packed(rows: np.ndarray, kind: str, k: int, pool):
    return module.pack(rows, kind, len(rows), k, module.Arena(1 << 21), pool)


def shifted(kind: str, rows: np.ndarray) -> np.ndarray:
    """With the zero points of the groups one row before."""
    blocks = rows.reshape(len(rows), -1, KINDS[kind].nbytes).copy()
    blocks[:, :, 2] = np.roll(blocks[:, :, 2], 1, axis=0)
    return blocks.reshape(rows.shape)


def outputs(layers: list[Any], x: np.ndarray, pool: Any, isa: str) -> Iterator[tuple[tuple[str, str], list[np.ndarray]]]:
    """What layers give of the same rows, each way: the path, and how inputs are rounded."""
    for path in ("direct", "panels"):
        for activations in ("group", "split") if len(x) < 8 else ("group",):
            given = {"path": path, "isa": isa, "activations": activations}
            yield (path, activations), [module.linear(layer, x, pool, **given) for layer in layers]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", POINTS)
def test_it_is_q5_0_bit_for_bit(kind: str, isa: str, pool) -> None:
    """Few rows and many, ragged sizes, segments, logits, outliers. Control: the zero points of the row before."""
    for n, k, unit in ((37, 384, 0), (16, 768, 64)):
        rows = random_rows(kind, n, k)
        variants = [(integer_rows("Q5_0", *row_integers(kind, rows)), "Q5_0"), (rows, kind), (shifted(kind, rows), kind)]
        layers = [module.PackedLinear([packed(each, name, k, pool)], segment_unit=unit) for each, name in variants]
        for m in (1, 2, 3, 5, 8, 41):
            x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
            x[:, ::50] *= 20
            for way, (wanted, ours, wrong) in outputs(layers, x, pool, isa):
                assert np.array_equal(ours.view(np.uint32), wanted.view(np.uint32)), (m, way)
                assert not np.array_equal(wrong, wanted)
            logits = [module.logits(layer, x, pool, isa=isa)[0] for layer in layers[:2]]
            assert np.array_equal(*logits)


@pytest.mark.parametrize("isa", ISAS)
def test_without_zero_points_it_is_q4_0_bit_for_bit(isa: str, pool) -> None:
    """So that groups of 128 lose nothing by fewer bytes. Control: the integers of the row before."""
    n, k = 37, 384
    rng = np.random.default_rng(1)
    values = rng.integers(-8, 8, (n, k)).astype(np.int8)
    scales = rng.standard_normal((n, k // 128)).astype(np.float16).repeat(4, axis=1)
    made = [("Q4_0", values), ("G4_128", values), ("G4_128", np.roll(values, 1, axis=0))]
    layers = [module.PackedLinear([packed(integer_rows(kind, each, scales), kind, k, pool)]) for kind, each in made]
    for m in (1, 3, 8, 41):
        x = rng.standard_normal((m, k)).astype(np.float32)
        for path in ("direct", "panels"):
            wanted, ours, wrong = (module.linear(layer, x, pool, path=path, isa=isa) for layer in layers)
            assert np.array_equal(ours.view(np.uint32), wanted.view(np.uint32)), (m, path)
            assert not np.array_equal(wrong, wanted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", WIDE)
def test_with_zero_points_of_128_it_is_q8_0_bit_for_bit(kind: str, isa: str, pool) -> None:
    """Few rows and many, segments, logits, outliers. Control: one zero point is 129."""
    for n, k, unit in ((37, 384, 0), (16, 768, 64)):
        rng = np.random.default_rng(n)
        codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
        scales = rng.standard_normal((n, k // WIDE[kind])).astype(np.float16).repeat(WIDE[kind] // 32, axis=1)
        zeros = np.full(scales.shape, 128, np.uint8)
        other = zeros.copy()
        other[: n // 2, : WIDE[kind] // 32] = 129
        variants = [
            (integer_rows("Q8_0", (codes - np.uint8(128)).view(np.int8), scales), "Q8_0"),
            *((grouped_rows(kind, codes, points, scales), kind) for points in (zeros, other)),
        ]
        layers = [module.PackedLinear([packed(each, name, k, pool)], segment_unit=unit) for each, name in variants]
        for m in (1, 2, 3, 5, 8, 41):
            x = rng.standard_normal((m, k)).astype(np.float32)
            x[:, ::50] *= 20
            for way, (wanted, ours, wrong) in outputs(layers, x, pool, isa):
                assert np.array_equal(ours.view(np.uint32), wanted.view(np.uint32)), (m, way)
                changed = (wrong != wanted).all(axis=0)
                assert changed.tolist() == [row < n // 2 for row in range(n)]
            assert np.array_equal(*(module.logits(layer, x, pool, isa=isa)[0] for layer in layers[:2]))


@pytest.mark.parametrize("kind", WIDE)
def test_bytes_and_any_zero_point_become_rows(kind: str) -> None:
    rng, span = np.random.default_rng(0), WIDE[kind]
    codes = rng.integers(0, 256, (256, 4 * span)).astype(np.uint8)
    zeros = np.arange(1024).reshape(256, 4).astype(np.uint8)
    scales = rng.standard_normal((256, 4)).astype(np.float16)
    rows = grouped_rows(kind, codes, *(each.repeat(span // 32, axis=1) for each in (zeros, scales)))
    values = codes.astype(np.float32) - zeros.repeat(span, axis=1)
    wanted = scales.astype(np.float32).repeat(span, axis=1) * values
    assert np.array_equal(dequantize_numpy(rows.reshape(-1), kind).reshape(256, -1), wanted)
    assert np.array_equal(dense_by_the_core(rows, kind), wanted)


@pytest.mark.parametrize("kind", POINTS)
def test_integers_become_rows_and_back(kind: str) -> None:
    """All that 4 bits and any zero point give, and nothing farther apart."""
    rng, span = np.random.default_rng(0), POINTS[kind]
    zeros = np.resize(np.arange(17), (20, 4))
    codes = rng.integers(0, 16, (20, 4, span))
    values = (codes - zeros[:, :, None]).astype(np.int8).reshape(20, -1)
    scales = rng.standard_normal((20, 4)).astype(np.float16)
    rows = integer_rows(kind, values, scales.repeat(span // 32, axis=1))
    found, again = row_integers(kind, rows)
    assert np.array_equal(found, values)
    assert np.array_equal(again, scales.repeat(span // 32, axis=1))
    wanted = scales.astype(np.float32).repeat(span, axis=1) * values
    assert np.array_equal(dequantize_numpy(rows.reshape(-1), kind).reshape(20, -1), wanted)
    for wrong in ([-9, 7], [0, 16], [-17, -10]):
        with pytest.raises(ValueError, match="integers that do not fit into 4 bits with a zero point"):
            integer_rows(kind, np.resize(np.array(wrong, np.int8), (1, span)), np.ones((1, span // 32), np.float16))


@pytest.mark.parametrize("kind", POINTS)
def test_zero_points_beyond_16_are_refused(kind: str, pool) -> None:
    """As scales that are no numbers are: by the packer, and by whoever reads the values."""
    rows = random_rows(kind, 20, 256, scales=np.array([0.5]))
    rows[7, 2] = 17
    packer = module.Packer(module.Arena(1 << 21))
    packer.add(rows, kind, 20, 256)
    assert packer.run(pool, 1 << 30) == [0]
    for values in (dense(rows, kind, 256), dense_by_the_core(rows, kind)):
        assert np.isnan(values).any(axis=1).tolist() == [row == 7 for row in range(20)]


def dense_by_the_core(rows: np.ndarray, kind: str) -> np.ndarray:
    out = np.empty(rows.size // KINDS[kind].nbytes * KINDS[kind].block, np.float32)
    module.dequantize(kind, rows.reshape(-1), out, 1)
    return out.reshape(len(rows), -1)
