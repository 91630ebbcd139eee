"""The native linear layers: exact integers, sums within rounding of float64, and rows that depend on nothing but themselves."""

import numpy as np
import pytest

from headrace import core
from headrace.weights.kinds import KINDS as STORED
from tests.native_blocks import INTEGER_KINDS, POINTS, SCALES, SPARSE, columns, dense, random_rows, round_bf16

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

module = core.module()
ISAS = module.cpu_info()["isas"]
PATHS = ("direct", "panels")
KINDS = (*INTEGER_KINDS, "BF16")


def layer(kind: str, n: int, k: int, pool, seed: int = 0, segment_unit: int = 0, **more):
    """A layer and its weights as float32 [n, k]."""
    rows = random_rows(kind, n, k, seed, **more)
    packed = module.pack(rows, kind, n, k, module.Arena(1 << 21), pool)
    return module.PackedLinear([packed], segment_unit=segment_unit), dense(rows, kind, k)


def inputs(m: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, m, k)).standard_normal((m, k)).astype(np.float32)


def seen(x: np.ndarray, kind: str) -> np.ndarray:
    """What the layer sees of its input, in float64: int8 with a scale per 32 columns, or bfloat16."""
    if kind == "BF16":
        return round_bf16(x).astype(np.float64)
    q, scale, *_ = module.quantize_a8(x)
    return (q * np.repeat(scale.astype(np.float64), 32, axis=1))[:, : x.shape[1]]


def equal_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("kind", INTEGER_KINDS)
def test_integers_are_exact(kind: str, isa: str, pool) -> None:
    """With scales that are powers of two and inputs of scale 1 every float operation is exact, so the sum must be."""
    for n, k in ((1, columns(kind)[0]), (37, columns(kind)[1])):
        linear, w = layer(kind, n, k, pool, scales=np.array([0.25, -0.5, 1.0, 0.0]))
        x = np.random.default_rng(k).integers(-20, 21, (9, k)).astype(np.float32)
        x[:, ::32] = 127 * np.sign(x[:, ::32] + 0.5)
        exact = x.astype(np.float64) @ w.T.astype(np.float64)
        assert np.abs(exact).max() < 2**22
        for path in PATHS:
            assert np.array_equal(module.linear(linear, x, pool, path=path, isa=isa), exact)


@pytest.mark.parametrize("kind", INTEGER_KINDS)
def test_the_largest_integers(kind: str, isa: str, pool) -> None:
    """Weights of one byte each, the largest and the smallest among them, times 127 of one sign and of both: no overflow."""
    k, block = max(columns(kind)[1], 192), STORED[kind].block
    x = np.tile(np.resize(np.float32([127, 127, -127, -127]), k), (9, 1))
    x[0], x[1], x[2, k // 2 :], x[3, ::2] = 127, -127, 127, -127
    for byte in (0x00, 0xFF, 0x80, 0x7F, 0xF0, 0x0F):
        rows = np.full((20, k // block, STORED[kind].nbytes), byte, np.uint8)
        for at in SCALES[kind]:
            rows[:, :, at : at + 2] = np.float16([0.5]).view(np.uint8)
        if kind == "MXFP4":
            rows[:, :, 0] = 127
        if kind in POINTS:
            rows[:, :, 2] = 0 if byte == 0xFF else 16
        if kind in SPARSE:
            rows[:, :, 2:6] = 0x4E, 0x8C, 0x9D, 0xE4  # all patterns
        rows = rows.reshape(20, -1)
        linear = module.PackedLinear([module.pack(rows, kind, 20, k, module.Arena(1 << 21), pool)])
        w = dense(rows, kind, k).astype(np.float64)
        exact, bound = x.astype(np.float64) @ w.T, 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(w).T)
        for path in PATHS:
            assert (np.abs(module.linear(linear, x, pool, path=path, isa=isa) - exact) <= bound).all(), hex(byte)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_within_rounding(kind: str, isa: str, pool) -> None:
    for n, k in ((1, columns(kind)[0]), (37, columns(kind)[-1]), (16, columns(kind)[1])):
        linear, w = layer(kind, n, k, pool)
        x = inputs(8, k)
        terms = np.abs(seen(x, kind)) @ np.abs(w.T.astype(np.float64))
        exact = seen(x, kind) @ w.T.astype(np.float64)
        for path in PATHS:
            assert (np.abs(module.linear(linear, x, pool, path=path, isa=isa) - exact) <= 4e-6 * terms + 1e-30).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_input_is_rounded_and_nothing_else(kind: str, pool) -> None:
    """Against the unrounded product: within what rounding the input can do, and not far below it (the control)."""
    k = 768 if columns(kind)[0] == 256 else 640
    linear, w = layer(kind, 64, k, pool)
    x = inputs(32, k)
    ours, exact = module.linear(linear, x, pool), x.astype(np.float64) @ w.T.astype(np.float64)
    step = 2**-8 * np.abs(x) if kind == "BF16" else np.repeat(np.abs(x).reshape(32, -1, 32).max(-1) / 254, 32, axis=1)
    deviation = np.sqrt((step**2 / 3) @ (w.T.astype(np.float64) ** 2))  # of a sum of uniform errors
    assert (np.abs(ours - exact) < 6 * deviation).all()
    assert np.sqrt(np.mean(((ours - exact) / deviation) ** 2)) > 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_other_rows(kind: str, isa: str, pool) -> None:
    """M = 1..33 on both paths: the same bits as in a batch of 33, and (integers) as on every other instruction set."""
    k = {256: 768, 32: 160, 1: 172}[32 if STORED[kind].block == 32 else 1 if kind == "BF16" else 256]
    for unit in (0, 64):
        linear, _ = layer(kind, 37, k, pool, segment_unit=unit)
        x = inputs(33, k)
        whole = module.linear(linear, x, pool, path="direct", isa=isa)
        if kind != "BF16":
            assert equal_bits(whole, module.linear(linear, x, pool, path="direct", isa=ISAS[0]))
        for first in range(33):
            for path in PATHS:
                assert equal_bits(module.linear(linear, x[first:], pool, path=path, isa=isa), whole[first:]), (
                    33 - first,
                    path,
                    unit,
                )


def test_many_rows_are_the_same_rows(isa: str, pool) -> None:
    """More rows than are multiplied at once, tensors side by side, and threads that share them."""
    m, k, arena = 300 if isa != "plain" else 262, 832, module.Arena(1 << 21)
    tensors = [module.pack(random_rows("Q4_1", n, k, n), "Q4_1", n, k, arena, pool) for n in (33, 50)]
    linear = module.PackedLinear(tensors, segment_unit=64)
    x = inputs(m, k)
    some = [0, 1, m // 2 - 1, m // 2, m - 2, m - 1]
    alone = module.linear(linear, x[some], pool, path="direct", isa=isa)
    for threads in (1, 3):
        for path in PATHS:
            assert equal_bits(module.linear(linear, x, module.ThreadPool(threads), path=path, isa=isa)[some], alone)


def test_bfloat16_is_the_same_on_all_vector_sets(pool) -> None:
    linear, _ = layer("BF16", 33, 172, pool)
    x = inputs(5, 172)
    results = [module.linear(linear, x, pool, isa=isa) for isa in ISAS if isa != "amx"]  # which sums in an order of its own
    for other in results[1:]:
        assert equal_bits(results[0], other)


# Fixed segments: segment i ends before unit floor((i + 1) * units / 8).
SEGMENTS = [
    (576, 64, [1, 2, 3, 4, 5, 6, 7, 9]),
    (1536, 64, [3, 6, 9, 12, 15, 18, 21, 24]),
    (1536, 128, [2, 6, 8, 12, 14, 18, 20, 24]),
    (8960, 64, [17, 35, 52, 70, 87, 105, 122, 140]),
    (256, 64, [0, 1, 1, 2, 2, 3, 3, 4]),
    (64, 64, [0, 0, 0, 0, 0, 0, 0, 1]),
    (172, 64, [0, 0, 1, 1, 1, 2, 2, 3]),
    (960, 320, [0, 0, 5, 5, 5, 10, 10, 15]),
]


@pytest.mark.parametrize(("k", "unit", "ends"), SEGMENTS)
def test_segment_boundaries(k: int, unit: int, ends: list[int], pool) -> None:
    assert layer("BF16", 1, k, pool, segment_unit=unit)[0].segments == ends


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q4_K", "Q6_K", "BF16"])
def test_segments_join_as_a_fixed_tree(kind: str, isa: str, pool) -> None:
    """Each segment alone (the other columns of the input zero), then ((0+1)+(2+3))+((4+5)+(6+7)) in float32."""
    for k in (256, 768, 1536) if kind != "Q4_1" else (192, 544):
        linear, _ = layer(kind, 20, k, pool, segment_unit=64)
        plain, _ = layer(kind, 20, k, pool)
        x = inputs(3, k)
        parts, start = [], 0
        for end in linear.segments:
            alone = np.zeros_like(x)
            alone[:, 64 * start : 64 * end] = x[:, 64 * start : 64 * end]
            parts.append(module.linear(plain, alone, pool, isa=isa))
            start = end
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        for path in PATHS:
            assert np.array_equal(module.linear(linear, x, pool, path=path, isa=isa), parts[0])
        # The control: the order of a sum shows, at every size.
        assert not np.array_equal(module.linear(plain, x, pool, isa=isa), parts[0])


@pytest.mark.parametrize("k", [4864, 8960])
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_panels_may_begin_inside_a_super_block(kind: str, k: int, isa: str, pool) -> None:
    """Panels hold at most 12 tiles, or 8; stretches of 11 begin at tiles 11, 22, 33 ..., and super blocks are 4 tiles long."""
    x = inputs(13, k)
    for unit in (0, 64):
        linear, w = layer(kind, 37, k, pool, segment_unit=unit)
        direct = module.linear(linear, x, pool, path="direct", isa=isa)
        assert equal_bits(module.linear(linear, x, pool, path="panels", isa=isa), direct)
        assert equal_bits(module.linear(linear, x, pool, path="direct", isa=ISAS[0]), direct)
        bound = 2e-6 * (np.abs(seen(x, kind)) @ np.abs(w.T.astype(np.float64)))
        assert (np.abs(direct - seen(x, kind) @ w.T.astype(np.float64)) <= bound).all()
        w[:, 704:768] = np.roll(w, 64, axis=1)[:, 704:768]  # the control: one tile of its neighbour's weights
        assert (np.abs(direct - seen(x, kind) @ w.T.astype(np.float64)) > bound).mean() > 0.9


@pytest.mark.parametrize("m", [23, 24, 39, 40, 41, 257, 511])
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_rows_around_the_limits_of_the_paths(kind: str, m: int, isa: str, pool) -> None:
    """Where panels begin to pay and where rows are cut into stretches: added, gated and as logits, what few rows give."""
    k, arena = 256, module.Arena(1 << 21)
    x, some = inputs(m, k), [0, m // 2 - 1, m // 2, m - 2, m - 1]
    linear, _ = layer(kind, 72, k, pool, segment_unit=64)
    residual = inputs(m, 72, seed=5)
    added = module.linear(linear, x, pool, add_to=residual, isa=isa)
    assert equal_bits(added[some], module.linear(linear, x[some], pool, add_to=residual[some], path="direct", isa=isa))
    assert equal_bits(added, module.linear(linear, x, pool, add_to=residual, path="panels", isa=isa))
    pair = module.pack_pair(*(part for seed in (0, 1) for part in (random_rows(kind, 72, k, seed), kind)), 72, k, arena, pool)
    gated = module.PackedLinear(list(pair), gated=True)
    for all_rows, few in zip(
        module.gated(gated, x, pool, isa=isa), module.gated(gated, x[some], pool, path="direct", isa=isa), strict=True
    ):
        assert np.array_equal(all_rows[some], few)
    for all_rows, few in zip(
        module.logits(linear, x, pool, isa=isa), module.logits(linear, x[some], pool, path="direct", isa=isa), strict=True
    ):
        assert equal_bits(all_rows[some], few)


def test_parts_of_different_kinds_lie_side_by_side(isa: str, pool) -> None:
    arena, x = module.Arena(1 << 21), inputs(7, 256)
    kinds, sizes = ("Q4_K", "Q8_0", "Q6_K"), (48, 5, 17)
    tensors, expected = [], []
    for kind, n in zip(kinds, sizes, strict=True):
        rows = random_rows(kind, n, 256)
        bias = inputs(1, n)[0]
        tensors.append(module.pack(rows, kind, n, 256, arena, pool, bias=bias))
        expected.append(seen(x, kind) @ dense(rows, kind, 256).T.astype(np.float64) + bias)
    together = module.PackedLinear(tensors)
    for path in PATHS:
        assert np.allclose(module.linear(together, x, pool, path=path, isa=isa), np.hstack(expected), rtol=1e-4, atol=1e-4)


def test_the_result_is_added_once(isa: str, pool) -> None:
    linear, _ = layer("Q5_0", 37, 96, pool, segment_unit=64)
    x, residual = inputs(8, 96), inputs(8, 37, seed=5)
    for path in PATHS:
        added = module.linear(linear, x, pool, add_to=residual, path=path, isa=isa)
        assert equal_bits(added, residual + module.linear(linear, x, pool, isa=isa))


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("kinds", [("Q4_1", "Q4_1"), ("Q5_0", "Q8_0"), ("BF16", "BF16")])
def test_gated_layers(kinds: tuple[str, str], act: str, isa: str, pool) -> None:
    """The fused layer is act(gate) * up bit for bit, left as float32, as A8 and as bfloat16; padding columns are zero."""
    for n in (172, 64, 33):
        gate, up = (random_rows(kind, n, 96, seed=i) for i, kind in enumerate(kinds))
        pair = module.pack_pair(gate, kinds[0], up, kinds[1], n, 96, module.Arena(1 << 21), pool)
        fused = module.PackedLinear(list(pair), gated=True)
        for m in (1, 7, 26):
            x = inputs(m, 96)
            parts = [module.linear(module.PackedLinear([tensor]), x, pool, isa=isa) for tensor in pair]
            expected = module.activate(act, parts[0], parts[1], isa)
            q, scale, *_ = module.quantize_a8(expected, isa=isa)
            for path in PATHS:
                value, a8, narrow = module.gated(fused, x, pool, act=act, path=path, isa=isa)
                assert equal_bits(value, expected)
                assert np.array_equal(a8, q * np.repeat(scale, 32, axis=1))
                assert np.array_equal(narrow[:, :n], round_bf16(expected))
                assert not narrow[:, n:].any()


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "BF16"])
def test_logits_and_their_maxima(kind: str, isa: str, pool) -> None:
    linear, _ = layer(kind, 200, 256, pool)
    for m in (1, 8, 21):
        x = inputs(m, 256)
        plain = module.linear(linear, x, pool, isa=isa)
        for path in PATHS:
            z, best = module.logits(linear, x, pool, path=path, isa=isa)
            assert equal_bits(z, plain)
            padded = np.full((m, 256), -np.inf, np.float32)
            padded[:, :200] = z
            assert equal_bits(best, padded.reshape(m, 4, 64).max(-1))
            capped, best = module.logits(linear, x, pool, scale=0.5, softcap=3.0, path=path, isa=isa)
            assert np.allclose(capped, 3 * np.tanh(plain.astype(np.float64) / 6), atol=2e-6)
            assert np.array_equal(best[:, 0], capped[:, :64].max(-1))


def test_a_nan_affects_only_its_row(isa: str, pool) -> None:
    linear, _ = layer("Q4_0", 20, 64, pool, scales=np.array([0.5]))
    x = inputs(3, 64)
    clean = module.linear(linear, x, pool, isa=isa)
    for bad in (np.nan, np.inf):
        x[1, 40] = bad
        for path in PATHS:
            y = module.linear(linear, x, pool, path=path, isa=isa)
            assert np.isnan(y[1]).all()
            assert equal_bits(y[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("kind", ["Q6_K", "BF16"])
def test_a_nan_logit_shows_in_the_maximum_of_its_block(kind: str, isa: str, pool) -> None:
    """Wherever it stands among the 64, also in a short last block, and where logits are capped."""
    n, k = 200, 256
    for at in (0, 15, 16, 40, 63, 64, 127, 192, 199):
        bias = np.zeros(n, np.float32)
        bias[at] = np.nan
        tensor = module.pack(random_rows(kind, n, k), kind, n, k, module.Arena(1 << 21), pool, bias=bias)
        linear = module.PackedLinear([tensor])
        for m, softcap in ((1, 0.0), (8, 5.0), (21, 0.0)):
            for path in PATHS:
                z, best = module.logits(linear, inputs(m, k), pool, softcap=softcap, path=path, isa=isa)
                assert np.array_equal(np.isnan(z), np.broadcast_to(np.arange(n) == at, z.shape))
                assert np.array_equal(np.isnan(best), np.broadcast_to(np.arange(4) == at // 64, best.shape))


def test_invalid_arguments_are_refused(pool) -> None:
    arena = module.Arena(1 << 21)
    a8, wider, narrow = (
        module.pack(random_rows(kind, 4, k), kind, 4, k, arena, pool) for kind, k in (("Q4_0", 64), ("Q4_0", 96), ("BF16", 64))
    )
    for tensors, more, message in (
        ([], {}, "at least one tensor"),
        ([a8, wider], {}, "the same input size"),
        ([a8, narrow], {}, "cannot share a linear layer"),
        ([a8], {"gated": True}, "a gate and an up tensor"),
        ([a8], {"segment_unit": 48}, "a multiple of 64 columns, not 48"),
    ):
        with pytest.raises(ValueError, match=message):
            module.PackedLinear(tensors, **more)
    with pytest.raises(ValueError, match="x must have 64 columns, not 96"):
        module.linear(module.PackedLinear([a8]), inputs(1, 96), pool)
