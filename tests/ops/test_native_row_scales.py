"""C8: int8 weights with one scale a row, times inputs with one scale a row: exact integer sums, scaled once."""

import numpy as np
import pytest

from headrace import core
from tests.native_blocks import dense, random_rows

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

module = core.module()
ISAS = module.cpu_info()["isas"]
PATHS = ("direct", "panels")
BY_ROW = {"token": 6.0, "tensor": 0.02}  # roundings with one scale a row, and their thresholds


def packed(rows: np.ndarray, kind: str, k: int, pool):
    return module.pack(rows, kind, len(rows), k, module.Arena(1 << 21), pool)


def inputs(m: int, k: int) -> np.ndarray:
    return np.random.default_rng((m, k)).standard_normal((m, k)).astype(np.float32)


def integers(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of C8 rows, int64 [n, k], and their scales, float32 [n]."""
    blocks = rows.reshape(len(rows), -1, 34)
    codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(len(rows), -1)
    return codes.astype(np.int64), np.ascontiguousarray(blocks[:, 0, :2]).view(np.float16)[:, 0].astype(np.float32)


def reference(rows: np.ndarray, x: np.ndarray, activations: str, ends: list[int]) -> np.ndarray:
    """Each segment: the exact integer sum, rounded to float32, times the scale of the input, times that of the weights.

    Segments are joined as ((0+1)+(2+3))+((4+5)+(6+7)).
    """
    q, x_scale, *_ = module.quantize_a8(x, activations=activations, threshold=BY_ROW[activations])
    w, w_scale = integers(rows)
    parts = []
    for first, last in zip([0, *ends[:-1]], ends, strict=True):
        columns = slice(64 * first, min(64 * last, w.shape[1]))
        exact = q[:, columns].astype(np.int64) @ w[:, columns].T
        parts.append(exact.astype(np.float32) * x_scale[:, :1] * w_scale)
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


@pytest.mark.parametrize("activations", BY_ROW)
def test_the_result_is_the_exact_sum_scaled_once(activations: str, isa: str, pool) -> None:
    """Bit for bit, for 1 to 33 rows, on both paths, in one sum and in segments. The controls: the scales of the next row, and
    weights that keep their offset of 128."""
    for k in (32, 160, 832):
        rows, x = random_rows("C8", 37, k), inputs(33, k)
        tensor = packed(rows, "C8", k, pool)
        for unit in (0, 64):
            linear = module.PackedLinear([tensor], segment_unit=unit)
            exact = reference(rows, x, activations, linear.segments)
            settings = {"isa": isa, "activations": activations, "threshold": BY_ROW[activations]}
            for first in range(33):
                for path in PATHS:
                    y = module.linear(linear, x[first:], pool, path=path, **settings)
                    assert np.array_equal(bits(y + 0), bits(exact[first:] + 0)), (33 - first, path, unit, k)
            others = np.roll(rows.reshape(37, -1, 34)[:, :, :2], 1, axis=0)
            wrong = rows.reshape(37, -1, 34).copy()
            wrong[:, :, :2] = others
            assert not np.array_equal(y, reference(wrong.reshape(37, -1), x, activations, linear.segments)[32:])
            shifted = rows.reshape(37, -1, 34).copy()
            shifted[:, :, 2:] ^= 0x80
            assert not np.array_equal(y, reference(shifted.reshape(37, -1), x, activations, linear.segments)[32:])


def test_threads_and_many_rows_change_nothing(isa: str, pool) -> None:
    rows, x = random_rows("C8", 72, 320), inputs(300 if isa != "plain" else 262, 320)
    linear = module.PackedLinear([packed(rows, "C8", 320, pool)], segment_unit=64)
    exact = reference(rows, x, "token", linear.segments)
    for threads in (1, 3):
        for path in ("", *PATHS):
            y = module.linear(linear, x, module.ThreadPool(threads), path=path, isa=isa, activations="token")
            assert np.array_equal(bits(y + 0), bits(exact + 0))


@pytest.mark.parametrize("activations", ["group", "split"])
def test_other_roundings_have_the_bits_of_q8_0(activations: str, isa: str, pool) -> None:
    """A scale for 32 inputs: the sums of Q8_0, also with outliers. The control: one scale a row gives other bits."""
    k = 160
    rows, x = random_rows("C8", 37, k), inputs(13, k) * 3
    layers = [module.PackedLinear([packed(rows, kind, k, pool)], segment_unit=64) for kind in ("C8", "Q8_0")]
    for path in PATHS:
        ours, theirs = (module.linear(one, x, pool, path=path, isa=isa, activations=activations) for one in layers)
        assert np.array_equal(bits(ours), bits(theirs))
        by_row, _ = (module.linear(one, x, pool, path=path, isa=isa, activations="token") for one in layers)
        assert not np.array_equal(bits(by_row), bits(ours))


@pytest.mark.parametrize("kinds", [("C8", "C8"), ("C8", "Q8_0"), ("Q4_1", "C8")])
def test_gates_added_results_and_logits(kinds: tuple[str, str], isa: str, pool) -> None:
    """The fused layers have the bits of single ones, also where only one of gate and up has a scale a row."""
    n, k, settings = 72, 160, {"isa": isa, "activations": "token"}
    gate, up = (random_rows(kind, n, k, seed) for seed, kind in enumerate(kinds))
    pair = module.pack_pair(gate, kinds[0], up, kinds[1], n, k, module.Arena(1 << 21), pool)
    single = [module.PackedLinear([one]) for one in pair]
    for m in (1, 7, 60):
        x, residual = inputs(m, k), inputs(m, n)
        for path in PATHS:
            parts = [module.linear(one, x, pool, path=path, **settings) for one in single]
            value, *_ = module.gated(module.PackedLinear(list(pair), gated=True), x, pool, path=path, **settings)
            assert np.array_equal(bits(value), bits(module.activate("silu", *parts, isa)))
            added = module.linear(single[0], x, pool, add_to=residual, path=path, **settings)
            assert np.array_equal(bits(added), bits(residual + parts[0]))
            logits, maxima = module.logits(single[1], x, pool, path=path, **settings)
            assert np.array_equal(bits(logits), bits(parts[1]))
            assert np.array_equal(maxima[:, 0], logits[:, :64].max(1))


@pytest.mark.parametrize("activations", BY_ROW)
def test_a_nan_affects_only_its_row(activations: str, isa: str, pool) -> None:
    k = 160
    linear, x = module.PackedLinear([packed(random_rows("C8", 20, k), "C8", k, pool)]), inputs(9, k)
    settings = {"isa": isa, "activations": activations, "threshold": BY_ROW[activations]}
    clean = module.linear(linear, x, pool, **settings)
    for bad in (np.nan, np.inf):
        x[4, 150] = bad
        for path in PATHS:
            y = module.linear(linear, x, pool, path=path, **settings)
            assert np.isnan(y[4]).all()
            assert np.array_equal(bits(np.delete(y, 4, 0)), bits(np.delete(clean, 4, 0)))


def test_the_widest_rows(isa: str, pool) -> None:
    """65,536 columns of the largest integers: no sum overflows. One block more is refused."""
    k = 65536
    rows = np.full((3, k // 32, 34), 127, np.uint8)
    rows[1, :, 2:] = 0x80
    rows[:, :, :2] = np.float16([0.5]).view(np.uint8)
    linear = module.PackedLinear([packed(rows.reshape(3, -1), "C8", k, pool)])
    x = np.full((3, k), 127, np.float32)
    x[1] = -127
    exact = reference(rows.reshape(3, -1), x, "token", linear.segments)
    assert (np.abs(exact) > 2**28).all()
    assert np.array_equal(module.linear(linear, x, pool, isa=isa, activations="token"), exact)
    with pytest.raises(ValueError, match=r"C8 rows have at most 65536 columns, not 65568; .* store them as Q8_0"):
        packed(random_rows("C8", 1, k + 32), "C8", k + 32, pool)


def test_different_scales_in_a_row_are_refused(pool) -> None:
    rows = random_rows("C8", 5, 160)
    rows[3, 34 * 2] ^= 1
    packer = module.Packer(module.Arena(1 << 21))
    packer.add(rows, "C8", 5, 160)
    assert packer.run(pool, 1 << 30) == [0]
    assert np.isnan(module.pack(rows, "C8", 5, 160, module.Arena(1 << 21), pool).unpack()[3]).all()
    assert np.array_equal(np.delete(dense(rows, "C8", 160), 3, 0), packed(np.delete(rows, 3, 0), "C8", 160, pool).unpack())
