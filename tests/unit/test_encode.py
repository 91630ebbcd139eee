"""Numbers into stored blocks: every kind against another reader, and its error against the `gguf` package's quantiser."""

from collections.abc import Callable

import gguf
import numpy as np
import pytest

from headrace.compress.grids import blocks, codes
from headrace.compress.grids import super as superblocks
from headrace.compress.grids.encode import ENCODERS, WRITTEN, encode
from headrace.weights.decode import dequantize_numpy
from headrace.weights.kinds import FLOATS, KINDS, NOT_GGUF
from headrace.weights.safetensors import SafetensorsFolder
from tests.places import model_file

THEIRS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")  # that the package quantises
# Square error over the square of normal numbers: a slip in a layout or a search loses more than this.
MOST = {
    "Q4_0": 7e-3, "Q4_1": 5.1e-3, "Q5_0": 1.7e-3, "Q5_1": 1.2e-3, "Q8_0": 2.9e-5, "Q2_K": 7e-2, "Q3_K": 2.2e-2, "Q4_K": 5.1e-3,
    "Q5_K": 1.3e-3, "Q6_K": 3e-4, "IQ4_NL": 5.7e-3,
    "MXFP4": 1.3e-2,
}  # fmt: skip


def matrices() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    size = (24, 512)
    made = {
        "normal": rng.standard_normal(size) * 0.02,
        "long tails": rng.standard_t(3, size),
        "shifted": rng.uniform(0.5, 1.5, size),
        "sparse": rng.standard_normal(size) * (rng.random(size) < 0.05),
        "tiny": rng.standard_normal(size) * 1e-5,
        "scales apart": rng.standard_normal(size) * 10.0 ** rng.integers(-4, 3, (24, 1)),
    }
    return {name: x.astype(np.float32) for name, x in made.items()}


MATRICES = matrices()


def back(rows: np.ndarray, kind: str) -> np.ndarray:
    return dequantize_numpy(rows.reshape(-1), kind).reshape(len(rows), -1)


def theirs(x: np.ndarray, kind: str) -> np.ndarray:
    number = gguf.GGMLQuantizationType[kind]
    return gguf.dequantize(gguf.quantize(x, number), number)


def square(x: np.ndarray, made: np.ndarray, weight: np.ndarray | float = 1.0) -> float:
    return float((weight * np.square(x.astype(np.float64) - made)).sum())


@pytest.mark.parametrize("kind", WRITTEN)
def test_another_reader_decodes_the_same_numbers(kind: str) -> None:
    for x in MATRICES.values():
        rows = encode(x, kind)
        assert rows.shape == (len(x), x.shape[1] // KINDS[kind].block * KINDS[kind].nbytes)
        stored = rows if kind == "BF16" or kind in ENCODERS else rows.view("<f4" if kind == "F32" else "<f2")
        np.testing.assert_array_equal(gguf.dequantize(stored, gguf.GGMLQuantizationType[kind]), back(rows, kind))


@pytest.mark.parametrize("kind", MOST)
def test_the_error_is_that_of_the_format(kind: str) -> None:
    x = MATRICES["normal"]
    assert square(x, back(encode(x, kind), kind)) < MOST[kind] * square(x, 0 * x)


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("name", MATRICES)
def test_no_block_has_more_error_than_the_reference_quantiser_leaves(kind: str, name: str) -> None:
    x = MATRICES[name]
    ours, reference = (
        np.square(x.astype(np.float64) - made).reshape(-1, 32).sum(1) for made in (back(encode(x, kind), kind), theirs(x, kind))
    )
    assert (ours <= reference * (1 + 1e-5)).all()
    if name in ("normal", "long tails") and kind != "Q8_0":
        assert ours.sum() < (0.97 if kind == "MXFP4" else 0.96) * reference.sum()  # of few scales


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoding_again_adds_only_the_error_of_scales(kind: str) -> None:
    """Zeros stay zeros, and numbers on the grid come back to it."""
    assert not back(encode(np.zeros((2, 256), np.float32), kind), kind).any()
    x = back(encode(MATRICES["normal"], kind), kind)
    assert square(x, back(encode(x, kind), kind)) < 0.04 * MOST[kind] * square(x, 0 * x)


@pytest.mark.parametrize("kind", ENCODERS)
def test_importance_lowers_the_error_that_it_weighs(kind: str) -> None:
    """The controls: no importance, and that of another matrix, leave more of it."""
    rng = np.random.default_rng(2)
    x = MATRICES["normal"]
    importance = rng.gamma(0.3, size=512).astype(np.float32) + 1e-3
    found = square(x, back(encode(x, kind, importance), kind), importance)
    others = [square(x, back(encode(x, kind, one), kind), importance) for one in (None, rng.permutation(importance))]
    assert found < 0.97 * min(others)
    np.testing.assert_array_equal(encode(x, kind, importance), encode(x, kind, 1024 * importance))
    np.testing.assert_array_equal(encode(x, kind, np.full(512, 3, np.float32)), encode(x, kind))


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_row_does_not_depend_on_other_rows(kind: str) -> None:
    x = np.concatenate(list(MATRICES.values()))[:, : max(256, KINDS[kind].block)]
    if KINDS[kind].block == 32:
        x = x[:, :32]
    whole = encode(x, kind, threads=2)
    for rows in (slice(0, 1), slice(5, 40), slice(143, 144)):
        np.testing.assert_array_equal(encode(x[rows], kind), whole[rows])


def nibbles_in_turn(q: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(q[:, ::2] | q[:, 1::2] << 4)


def slips() -> dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]]:
    """Broken encoders, each with its kind: what the tests above must find."""
    one = superblocks
    return {
        "nibbles in turn": ("Q4_0", lambda m: m.setattr(codes, "pack_halves", nibbles_in_turn)),
        "no high bits of scales": ("Q4_K", lambda m: m.setattr(one, "_six_bits", lambda s, n: one_six_bits(s & 15, n & 15))),
        "scale and minimum swapped": ("Q5_K", lambda m: m.setattr(one, "_six_bits", lambda s, n: one_six_bits(n, s))),
        "a search of one scale": ("Q4_0", lambda m: m.setattr(blocks, "OFFSETS", np.zeros(1))),
        "units that are not those stored": ("Q6_K", lambda m: m.setattr(one, "halves", lambda d: blocks.halves(d * 1.01))),
    }  # fmt: skip


one_six_bits = superblocks._six_bits


@pytest.mark.parametrize("slip", slips())
def test_a_coding_fault_raises_the_error(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, breaks = slips()[slip]
    x = MATRICES["normal"]
    before = square(x, back(encode(x, kind), kind))
    breaks(monkeypatch)
    assert square(x, back(encode(x, kind), kind)) > 1.005 * before


def test_unsupported_kinds_are_a_one_line_error() -> None:
    x = np.ones((2, 48), np.float32)
    for kind, message in (
        ("Q4_0", "rows of 48 numbers cannot be divided into the blocks of 32"),
        ("IQ4_XS", "IQ4_XS cannot be written"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(x, kind)
    x = np.ones((2, 256), np.float32)
    for importance, message in ((np.ones(32), "32 columns and the matrix 256"), (np.zeros(256), "not all 0")):
        with pytest.raises(ValueError, match=message):
            encode(x, "Q4_0", importance.astype(np.float32))
    for value, kind, message in (
        (np.nan, "Q4_K", "NaN or infinite"),
        (1e30, "Q8_0", "too large for a 16-bit scale"),
        (1e5, "F16", "beyond 65504"),
        (3.4e38, "BF16", "too large for BF16"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(np.full((1, 256), value, np.float32), kind)
    assert set(WRITTEN) == set(KINDS) - {"IQ4_XS", *NOT_GGUF}
    assert set(FLOATS) < set(WRITTEN)


@pytest.mark.weights
@pytest.mark.parametrize("kind", THEIRS)
def test_real_matrices_have_less_error_than_the_reference_quantiser_leaves(kind: str) -> None:
    """Every linear of MiniLM, as it was published in float32."""
    source = SafetensorsFolder(model_file("all-MiniLM-L6-v2"))
    weights = [name for name in source.names() if name.endswith("weight") and ".layer." in name]
    matrices = [name for name in weights if len(source.info(name).shape) == 2]
    assert len(matrices) == 36
    for name in matrices:
        x = source.raw(name)[::4].view("<f4")
        ours, reference = square(x, back(encode(x, kind), kind)), square(x, theirs(x, kind))
        assert ours < (1 if kind == "Q8_0" else 0.97) * reference, name
