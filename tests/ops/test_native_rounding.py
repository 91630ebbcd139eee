"""How inputs become integers: a scale for a row, and outliers that stay out. A row never depends on its neighbours."""

import numpy as np
import pytest
import torch

from headrace import core
from headrace.backends.eager.rounded import rounded
from tests.native_blocks import INTEGER_KINDS, columns, dense, random_rows

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

module = core.module()
ISAS = module.cpu_info()["isas"]
PATHS = ("direct", "panels")
MOST = 64  # outliers of a row


def rows(m: int, k: int, outliers: int = 0, seed: int = 0) -> np.ndarray:
    """Normal numbers, and in each row some that are far larger, in columns of its own."""
    rng = np.random.default_rng((seed, m, k))
    x = np.clip(rng.standard_normal((m, k)), -3, 3).astype(np.float32)
    for row in x:
        row[rng.choice(k, outliers, replace=False)] *= 40
    return x


def layer(kind: str, n: int, k: int, pool):
    stored = random_rows(kind, n, k)
    packed = module.pack(stored, kind, n, k, module.Arena(1 << 21), pool)
    return module.PackedLinear([packed]), dense(stored, kind, k)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


@pytest.mark.parametrize("k", [1, 33, 64, 172])
def test_a_scale_for_a_row(k: int, isa: str) -> None:
    """The paper's integers, bit for bit; padding is zero; a number that is not finite shows in its row."""
    x = rows(5, k)
    x[1], x[2] = 0, x[2] * 1e-37
    q, scale, scaled_sum, neg32, neg16 = module.quantize_a8(x, isa=isa, activations="token")
    largest = np.abs(x).max(1, keepdims=True)
    tiny = largest <= 1e-35
    inverse = np.where(tiny, 0, np.float32(127) / np.where(tiny, 1, largest)).astype(np.float32)
    assert np.array_equal(q[:, :k], np.rint(x * inverse).astype(np.int8))
    assert not q[:, k:].any()
    assert np.array_equal(scale, np.broadcast_to(np.where(tiny, 0, largest / np.float32(127)), scale.shape))
    sums = q.reshape(5, -1, 16).astype(np.int32).sum(-1)
    assert np.array_equal(neg16, -sums)
    assert np.array_equal(neg32, -sums.reshape(5, -1, 2).sum(-1))
    assert np.array_equal(scaled_sum, scale * -neg32.astype(np.float32))
    x[3, k // 2] = np.inf
    assert np.isnan(module.quantize_a8(x, isa=isa, activations="token")[1][3]).all()


@pytest.mark.parametrize("k", [1, 33, 64, 172])
def test_a_given_scale_is_used_for_all_rows(k: int, isa: str) -> None:
    """For all rows: to nearest, what is beyond 127 cut off; as torch has it; a number that is not finite shows in its row."""
    x, given = rows(5, k), np.float32(0.011)
    q, scale, scaled_sum, neg32, _ = module.quantize_a8(x, isa=isa, activations="tensor", threshold=float(given))
    assert np.array_equal(q[:, :k], np.rint(np.clip(x / given, -127, 127)).astype(np.int8))
    assert (np.abs(q) == 127).any() or k == 1
    assert not q[:, k:].any()
    assert (scale == given).all()
    assert np.array_equal(scaled_sum, scale * -neg32.astype(np.float32))
    made = rounded(torch.from_numpy(x), "tensor", scale=float(given)).numpy()
    assert np.array_equal(made, q[:, :k] * given)
    x[3, k // 2] = np.nan
    found = module.quantize_a8(x, isa=isa, activations="tensor", threshold=float(given))[1]
    assert np.array_equal(np.isnan(found).all(1), np.arange(5) == 3)
    assert np.isnan(found).sum() == found.shape[1]


def test_the_product_of_a_row_with_one_scale(isa: str, pool) -> None:
    """Integers times integers, exactly, times the two scales. The control: a scale for each column of inputs does not factor
    out, and the product of integers says something else."""
    k, n = 160, 37
    q = np.random.default_rng(0).integers(-127, 128, (n, k)).astype(np.int8)
    stored = np.zeros((n, k // 32, 34), np.uint8)
    stored[:, :, :2] = np.float16([0.5]).view(np.uint8)
    stored[:, :, 2:] = q.reshape(n, -1, 32).view(np.uint8)
    packed = module.pack(stored.reshape(n, -1), "Q8_0", n, k, module.Arena(1 << 21), pool)
    x = rows(9, k)
    integers, scale, *_ = module.quantize_a8(x, activations="token")
    exact = (integers[:, :k].astype(np.int64) @ q.T.astype(np.int64)).astype(np.float64) * scale[:, :1] * 0.5
    for path in PATHS:
        y = module.linear(module.PackedLinear([packed]), x, pool, path=path, isa=isa, activations="token")
        assert (np.abs(y - exact) <= 1e-6 * np.abs(integers[:, :k]).astype(np.float64) @ np.abs(q.T) * scale[:, :1]).all()
    true = x.astype(np.float64) @ q.T * 0.5
    by_column = np.rint(x / np.abs(x).max(0) * 127) @ q.T.astype(np.float64)
    best = (by_column * true).sum(1, keepdims=True) / np.square(by_column).sum(1, keepdims=True)  # one scale for each row
    assert np.square(best * by_column - true).sum() > 4 * np.square(exact - true).sum()


def test_outliers_are_the_largest(isa: str) -> None:
    """At the threshold and beyond, of more than there is room for the largest, of equal ones the first; what is left has zeros
    in their place."""
    x = rows(4, 172, 5)
    x[1] = np.resize(np.float32([7, -7, 9, 6.5]), 172)  # 43 nines, then the first of the sevens
    x[2] = np.where(np.arange(172) == 40, np.inf, 1)
    x[3] = np.where(np.arange(172) < MOST, 6, 5.999)
    q, scale, _, _, _, column, value = module.quantize_a8(x, isa=isa, activations="split")
    for row, (at, out) in enumerate(zip(column, value, strict=True)):
        sizes = np.where(np.isfinite(x[row]), np.abs(x[row]), -1)
        wanted = np.argsort(-sizes, kind="stable")[:MOST]
        wanted = np.sort(wanted[sizes[wanted] >= 6])
        assert np.array_equal(at[at >= 0], wanted), row
        assert np.array_equal(out[: len(wanted)], x[row, wanted])
    left = x.copy()
    for row, at in enumerate(column):
        left[row, at[at >= 0]] = 0
    assert np.array_equal(bits(scale), bits(module.quantize_a8(left)[1]))
    assert np.array_equal(q, module.quantize_a8(left)[0])
    assert np.isnan(scale[2, 1])


@pytest.mark.parametrize("kind", INTEGER_KINDS)
def test_outliers_multiply_the_exact_weights(kind: str, isa: str, pool) -> None:
    """One input that is not 0: its product with the dequantised column, to the bit, in every column of a tile."""
    k = columns(kind)[1]
    linear, w = layer(kind, 37, k, pool)
    for start in range(0, k, 96):
        x = np.zeros((min(96, k - start), k), np.float32)
        for row in range(len(x)):
            x[row, start + row] = -6.5 - row
        y = module.linear(linear, x, pool, path=PATHS[start // 96 % 2], isa=isa, activations="split")
        assert np.array_equal(y, x[:, start : start + len(x)].diagonal()[:, None] * w[:, start : start + len(x)].T)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q6_K", "S4"])
def test_a_row_does_not_depend_on_other_rows(kind: str, isa: str, pool) -> None:
    """M = 1..33 on both paths, as on every instruction set: the same bits. The control: outliers of all rows taken out of each
    (as the paper does it) give other bits, and others again beside other rows."""
    k = columns(kind)[1]
    linear, _ = layer(kind, 37, k, pool)
    x = rows(33, k, 3)
    for activations in ("token", "split"):
        whole = module.linear(linear, x, pool, path="direct", isa=isa, activations=activations)
        assert np.array_equal(bits(whole), bits(module.linear(linear, x, pool, isa=ISAS[0], activations=activations)))
        for first in range(0, 33, 1 if kind == "Q4_0" else 8):
            for path in PATHS:
                some = module.linear(linear, x[first:], pool, path=path, isa=isa, activations=activations)
                assert np.array_equal(bits(some), bits(whole[first:])), (33 - first, path)

    def of_the_batch(batch: np.ndarray) -> np.ndarray:
        column = (np.abs(batch) >= 6).any(0)
        plain = module.linear(linear, np.where(column, 0, batch).astype(np.float32), pool, isa=isa)
        apart = module.linear(linear, np.where(column, batch, 0).astype(np.float32), pool, isa=isa)
        return plain + apart

    assert not np.array_equal(of_the_batch(x[:4])[0], of_the_batch(x[:1])[0])


def test_thresholds_at_both_ends(isa: str, pool) -> None:
    """Infinite: the plain product, to the bit. 0: no input is rounded, up to 64 of a row."""
    x = rows(9, 64, 3)
    linear, w = layer("Q4_0", 37, 64, pool)
    for path in PATHS:
        settings = {"path": path, "isa": isa}
        endless = module.linear(linear, x, pool, activations="split", threshold=np.inf, **settings)
        assert np.array_equal(bits(endless), bits(module.linear(linear, x, pool, **settings)))
        none = module.linear(linear, x, pool, activations="split", threshold=0.0, **settings)
        exact, terms = x.astype(np.float64) @ w.T, np.abs(x).astype(np.float64) @ np.abs(w.T)
        assert (np.abs(none - exact) <= 1e-6 * terms).all()
        assert not (np.abs(endless - exact) <= 1e-6 * terms).all(), "the control"


def test_gates_and_logits_have_their_outliers(isa: str, pool) -> None:
    n, k, arena = 40, 64, module.Arena(1 << 21)
    parts = [random_rows("Q4_0", n, k, seed) for seed in (1, 2)]
    pair = module.pack_pair(parts[0], "Q4_0", parts[1], "Q4_0", n, k, arena, pool)
    w = [dense(part, "Q4_0", k) for part in parts]
    for m in (3, 60):
        x = rows(m, k, 3)
        y, *_ = module.gated(module.PackedLinear(list(pair), gated=True), x, pool, isa=isa, activations="split", threshold=0.0)
        gate, up = (x.astype(np.float64) @ one.T for one in w)
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(y, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)
        single = module.PackedLinear([module.pack(parts[0], "Q4_0", n, k, arena, pool)])
        logits, maxima = module.logits(single, x, pool, isa=isa, activations="split", threshold=0.0)
        np.testing.assert_allclose(logits, gate, rtol=1e-4, atol=1e-4)
        assert np.array_equal(maxima[:, 0], logits.max(1))


def test_outliers_degrade_only_one_scale_per_row(pool) -> None:
    """A few inputs forty times as large: with one scale for a row little is left of the others; in torch as in the core."""
    linear, w = layer("Q8_0", 64, 640, pool)
    x = rows(16, 640, 4)
    exact = x.astype(np.float64) @ w.T
    spread = np.sqrt(np.square(exact).mean())

    def lost(y: np.ndarray) -> float:
        return float(np.sqrt(np.square(y - exact).mean()) / spread)

    for core_name, twin in (("token", "token"), ("split", "split")):
        y = module.linear(linear, x, pool, activations=core_name)
        torch_y = rounded(torch.from_numpy(x), twin).double().numpy() @ w.T.astype(np.float64)
        assert lost(y - (torch_y - exact)) < 1e-5
    token, split, group = (lost(module.linear(linear, x, pool, activations=name)) for name in ("token", "split", "group"))
    assert token > 1.5 * group
    assert group > 4 * split


def test_an_unknown_rounding_is_refused(pool) -> None:
    with pytest.raises(ValueError, match="activations must be group, token, split or tensor, not row"):
        module.quantize_a8(rows(1, 32), activations="row")
