"""Grids of numbers: bounds of their errors, zero, spacing, signs, what shares a scale; and how formats are named."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compress.grids import grid
from headrace.compress.grids.codes import CODES
from headrace.compress.grids.errors import measure, split
from headrace.compress.grids.grid import Table, Uniform, fit, grouped
from headrace.compress.grids.spec import NumberFormat, parse
from headrace.compress.grids.targets import target
from headrace.weights.decode import dequantize_numpy
from headrace.weights.kinds import KINDS

NAMES = "int4 int8-tensor-sym int3-g64 nf4-g64 e4m3-tensor e5m2 e2m1-g32 mxfp4 nvfp4 pow4-g64 lloyd4 Q4_K Q8_0 BF16".split()
FAMILIES = ("int4", "int4-sym", "int8", "nf4", "e4m3", "e2m1", "mxfp4", "nvfp4", "pow4", "lloyd4")
RNG = np.random.default_rng(5)
NORMAL = RNG.standard_normal((64, 512)).astype(np.float32)
EVEN = RNG.uniform(-1, 1, (64, 512)).astype(np.float32)


def scaled(seed: int) -> np.ndarray:
    """Rows of very different sizes, some of them on one side of zero, one of them zeros."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((6, 96)) * 10.0 ** rng.integers(-4, 4, (6, 1)) + rng.integers(-2, 3, (6, 1))
    rows[0] = 0
    return rows.astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_printed_names_parse_to_themselves(name: str) -> None:
    assert str(parse(name)) == str(parse(name.lower())) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Q4_K_Z", "did you mean Q4_K"),
        ("q8-0", "did you mean Q8_0"),
        ("int9", "unknown format 'int9'"),
        ("int4-128", "write int4, then -tensor, -row or -g128"),
        ("nf3", "have 4 bits; write nf4"),
    ],
)
def test_an_invalid_name_is_a_one_line_error_with_a_suggestion(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as found:
        parse(name)
    assert "\n" not in str(found.value)


def test_bits_with_their_scales() -> None:
    """A scale takes 16 bits, a zero point as many as a code."""
    bits = {name: parse(name).stored_bits(1024, 4096) for name in ("int4-g128", "int4-g128-sym", "int8-sym", "Q4_K", "Q8_0")}
    assert bits == {
        "int4-g128": 4 + 20 / 128, "int4-g128-sym": 4 + 16 / 128, "int8-sym": 8 + 16 / 4096, "Q4_K": 4.5, "Q8_0": 8.5,
    }  # fmt: skip
    assert parse("int4-tensor").stored_bits(1024, 4096) - 4 < 1e-4
    assert all(parse(kind).stored_bits(8, 256) == 8 * KINDS[kind].nbytes / KINDS[kind].block for kind in CODES)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(FAMILIES), st.sampled_from([None, 0, 32]))
def test_every_grid_has_zero_is_idempotent_and_never_skips_a_nearer_value(seed: int, name: str, group: int | None) -> None:
    w = grouped(scaled(seed), group)
    grid = fit(w, replace(parse(name), group=group))
    made = grid.snap(w)
    assert (grid.snap(np.zeros_like(w)) == 0).all()
    np.testing.assert_allclose(grid.snap(made), made, rtol=1e-6)
    if isinstance(grid, Uniform):
        inside = (w >= grid.bounds()[0]) & (w <= grid.bounds()[1])
        assert (np.abs(w - made) <= np.where(inside, grid.scale / 2 * 1.00001, np.inf)).all()
        assert (np.abs(w - made) <= grid.scale * 1.00001).all()  # what is cut off is less than a step
    else:
        assert isinstance(grid, Table)
        nearest = np.abs(w[:, :, None] - grid.scale[:, :, None] * grid.table).min(-1)
        np.testing.assert_allclose(np.abs(w - made), nearest, rtol=1e-4, atol=1e-7 * float(np.abs(w).max()))


def test_wrong_zero_and_half_up_rounding_give_other_codes() -> None:
    """The controls: steps that lie around zero (values (q + 1/2) · S), and rounding that is not half to even."""
    around = lambda w: (np.floor(w / 0.25) + 0.5) * 0.25  # noqa: E731
    assert around(0.0) != 0 == fit(grouped(EVEN, None), parse("int4-tensor")).snap(np.zeros((1, 1))).item()
    one = Uniform(np.ones((1, 1), np.float32), np.zeros((1, 1), np.int32), -8, 7)
    halves = np.array([[0.5, 1.5, 2.5, -0.5, -1.5]])
    assert one.codes(halves).tolist() == [[0, 2, 2, 0, -2]] != np.floor(halves + 0.5).tolist()


def test_w52_uniform_grids_are_evenly_spaced_and_others_are_not() -> None:
    """Integers are; E4M3, E5M2, E2M1, NF4 and powers of two are not, and are wide where numbers are rare."""
    one = Uniform(np.ones((1, 1), np.float32), np.zeros((1, 1), np.int32), -8, 7)
    assert np.unique(np.diff(one.values(np.arange(-8, 8)))).size == 1
    sizes = {"e4m3": (253, 448), "e5m2": (247, 57344), "e2m1": (15, 6)}
    for name, (count, most) in sizes.items():
        assert (len(grid.minifloat(name)), grid.minifloat(name)[-1]) == (count, most)
    assert grid.minifloat("e2m1").tolist()[7:] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for table in (*map(grid.minifloat, sizes), grid.normal_float(), grid.powers(4)):
        gaps = np.diff(table[table >= 0])
        assert np.unique(gaps).size > 1
        assert gaps[-1] == gaps.max()
    np.testing.assert_allclose(  # the constants that bitsandbytes has
        grid.normal_float()[[0, 1, 6, 7, 8, 14, 15]],
        [-1.0, -0.6961928009986877, -0.09105003625154495, 0, 0.07958029955625534, 0.7229568362236023, 1.0],
        atol=1e-6,
    )


def square(w: np.ndarray, name: str) -> float:
    """Mean squared error of the grid that spans each group's range, without a search of scales."""
    groups = grouped(w, parse(name).group)
    return float(np.square(groups - fit(groups, parse(name)).snap(groups)).mean())


def test_w52_which_grid_suits_depends_on_the_numbers() -> None:
    errors = {(name, w is NORMAL): square(w, name) for name in ("nf4-g64", "int4-g64-sym") for w in (NORMAL, EVEN)}
    assert errors["nf4-g64", True] < errors["int4-g64-sym", True]
    assert errors["nf4-g64", False] > errors["int4-g64-sym", False]
    assert measure(NORMAL, parse("lloyd4")).square < measure(NORMAL, parse("nf4")).square


def test_signs_matter_where_numbers_lie_on_one_side() -> None:
    """Zero becomes code 0 without a zero point; with one, shifted numbers keep twice the steps."""
    grid = fit(np.array([[0.0, 3.0, 7.0]]), parse("int4-sym"))
    assert isinstance(grid, Uniform)
    assert grid.codes(np.zeros((1, 1))).item() == 0
    relu = np.maximum(NORMAL, 0)
    assert square(relu, "int4-g64") < 0.3 * square(relu, "int4-g64-sym")


def test_a_written_format_is_measured_as_compress_writes_it() -> None:
    """With searched scales, which lose less than the range over the steps."""
    w = NORMAL[:, :128]
    for name in ("int4-g128", "int4-g64-sym", "int3-g32", "int8-sym", "mxfp4", "nvfp4", "Q4_K"):
        k = 256 if name == "Q4_K" else 128
        to = target(name)
        rows = to.encode(NORMAL[:, :k])
        values = dequantize_numpy(rows.reshape(-1), to.kind).reshape(len(NORMAL), k)
        written = np.square(NORMAL[:, :k].astype(np.float64) - values).mean()
        assert measure(NORMAL[:, :k], parse(name)).square == pytest.approx(written, rel=1e-6), name
    plain = fit(grouped(w, 128), parse("int4-g128"))
    assert measure(w, parse("int4-g128")).square < 0.98 * np.square(grouped(w, 128) - plain.snap(grouped(w, 128))).mean()


def test_w53_the_integer_zero_in_both_conventions() -> None:
    """It stands for -S·Z where x̂ = S(q - Z), for S·Z' where x̂ = S(q + Z'); the numbers are the same."""
    grid = fit(scaled(3), parse("int4"))
    assert isinstance(grid, Uniform)
    codes = grid.codes(scaled(3))
    np.testing.assert_allclose(grid.values(np.zeros_like(grid.zero)), -grid.scale * grid.zero, rtol=1e-6)
    np.testing.assert_allclose(grid.values(np.zeros_like(grid.zero)), grid.scale * grid.added, rtol=1e-6)
    np.testing.assert_allclose(grid.values(codes), grid.scale * (codes + grid.added), rtol=1e-6)
    assert not np.allclose(grid.values(codes), grid.scale * (codes + grid.zero))  # the conventions mixed up


def test_the_product_of_integers_needs_the_zero_points_sums() -> None:
    """(q_x - Z_x) q_w = q_x q_w - Z_x Σ q_w, in integers, exactly."""
    x, w = fit(EVEN[:4] + 1, parse("int8")), fit(NORMAL, parse("int8-sym"))
    assert isinstance(x, Uniform)
    assert isinstance(w, Uniform)
    qx, qw = x.codes(EVEN[:4] + 1).astype(np.int64), w.codes(NORMAL).astype(np.int64)
    np.testing.assert_array_equal((qx - x.zero) @ qw.T, qx @ qw.T - x.zero * qw.sum(1))


def test_w54_fewer_numbers_that_share_a_scale_have_less_error() -> None:
    """Tensor ≥ row (channel, token) ≥ groups of 128, 64, 32, and each scale costs 16 bits."""
    w = NORMAL * np.exp(RNG.standard_normal((64, 1))).astype(np.float32)
    shared = ("int4-tensor-sym", "int4-sym", "int4-g128-sym", "int4-g64-sym", "int4-g32-sym")
    errors = [measure(w, parse(name)).square for name in shared]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 3 * errors[1] > 3 * errors[-1]
    bits = [parse(name).stored_bits(*w.shape) for name in shared]
    assert bits == sorted(bits)
    assert bits[-1] == 4.5


def test_the_error_is_split_into_rounding_and_clipping() -> None:
    w = np.array([[-1.5, -0.25, 0.5, 2.0]], np.float32)
    made = np.array([[-1.0, 0.0, 0.5, 1.0]], np.float32)
    found = split(w, made, np.float32(-1), np.float32(1), np.full(1, 0.5, np.float32))
    assert (found.rounding, found.clipping, found.noise) == (0.0625 / 4, 1.25 / 4, 0.25 / 12)
    assert found.sqnr == pytest.approx(10 * np.log10((2.25 + 0.0625 + 0.25 + 4) / (0.0625 + 1.25)))


def test_each_bit_gains_six_decibels_and_noise_is_a_twelfth_of_step_squared() -> None:
    errors = [measure(EVEN, NumberFormat("int", bits, None, True)) for bits in range(3, 9)]
    gains = np.diff([one.sqnr for one in errors])
    assert (np.diff(gains) < 0).all()  # 2^(b-1) - 1 steps, not 2^(b-1): at few bits another one is worth more
    assert abs(gains[-1] - 6.02) < 0.1
    assert all(abs(one.rounding / one.noise - 1) < 0.02 for one in errors)


@pytest.mark.parametrize("kind", CODES)
def test_the_error_of_a_kind_separates_clipping_and_rounding(kind: str) -> None:
    """Searched scales cut off a little; the rest is rounding, near S²/12 where a step has a fixed size."""
    found = measure(NORMAL, parse(kind))
    assert found.clipping < (0.5 if kind == "Q2_K" else 0.3) * found.rounding
    if found.noise:
        assert 0.5 < found.rounding / found.noise < 1.02


def test_groups_are_whole() -> None:
    with pytest.raises(ValueError, match="rows of 96 numbers cannot be divided into groups of 64"):
        grouped(scaled(0), 64)
