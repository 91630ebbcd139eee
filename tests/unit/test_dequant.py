"""Stored blocks to numbers: numpy twin against the gguf package, native core against the twin, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from headrace import core
from headrace.weights import decode
from headrace.weights.decode import dequantize, dequantize_numpy
from headrace.weights.kinds import KINDS, NOT_GGUF
from headrace.weights.loader import to_torch
from headrace.weights.source import WeightError

GGUF = [kind for kind in KINDS if kind not in NOT_GGUF]
# As bitsandbytes has them (functional.py: create_normal_map, FP4), and how far ours may be from them.
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
FP4 = [0, 0.0625 / 12, 8 / 12, 1, 4 / 12, 6 / 12, 2 / 12, 3 / 12]
TABLES = {"NF4": (NF4, 123.26, 1 / 350), "FP4": ([*FP4, *(-x for x in FP4)], 96, 1 / 190)}
needs_core = pytest.mark.skipif(not core.available(), reason=core.reason())


def random_blocks(kind: str, count: int, seed: int = 0) -> np.ndarray:
    """Any bytes are valid blocks, infinite and subnormal scales included."""
    return np.random.default_rng(seed).integers(0, 256, count * KINDS[kind].nbytes, np.uint8)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit patterns, NaN where NaN."""
    assert actual.dtype == expected.dtype == np.float32
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), ~known)
    np.testing.assert_array_equal(actual[known].view(np.uint32), expected[known].view(np.uint32))


@pytest.mark.parametrize("kind", GGUF)
def test_block_sizes_are_the_formats(kind: str) -> None:
    assert tuple(KINDS[kind]) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


@pytest.mark.parametrize("kind", GGUF)
def test_numpy_equals_the_oracle(kind: str) -> None:
    data = random_blocks(kind, 700)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data.reshape(1, -1), gguf.GGMLQuantizationType[kind]).astype(np.float32).reshape(-1)
    assert np.isfinite(expected).mean() > 0.8
    assert_same_bits(dequantize_numpy(data, kind), expected)


@needs_core
@pytest.mark.parametrize("kind", KINDS)
def test_native_equals_numpy(kind: str) -> None:
    data = random_blocks(kind, 700, seed=1)
    out = np.empty(700 * KINDS[kind].block, np.float32)
    core.module().dequantize(kind, data, out, 1)
    assert_same_bits(out, dequantize_numpy(data, kind))


@pytest.mark.parametrize("kind", TABLES)
def test_tables_equal_those_of_bitsandbytes_within_rounding(kind: str) -> None:
    """Codes in the order of a block: low nibbles, then high ones. The halves are powers of two."""
    table, largest, most = TABLES[kind]
    codes = np.arange(32, dtype=np.uint8) % 16
    block = np.concatenate([np.float16([0.5]).view(np.uint8), codes[:16] | codes[16:] << 4])
    ours = dequantize_numpy(block, kind) / (0.5 * largest)
    apart = np.abs(ours - np.array(table)[codes])
    assert apart.max() < most
    assert np.abs(ours - np.array(table)[codes ^ 1]).max() > 10 * most, "the control: another order of codes"


@needs_core
def test_a_wrong_scale_changes_the_values() -> None:
    """The comparison is sharp: one flipped bit of one scale is caught."""
    data = random_blocks("Q6_K", 50)
    expected = dequantize_numpy(data, "Q6_K")
    data[-18] ^= 1
    with pytest.raises(AssertionError):
        assert_same_bits(dequantize(data, "Q6_K"), expected)


@needs_core
def test_every_half_is_converted_exactly() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    assert_same_bits(dequantize(halves.view(np.uint8), "F16"), halves.view(np.float16).astype(np.float32))


@needs_core
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_do_not_change_the_result(threads: int) -> None:
    data = random_blocks("Q5_0", 10_007)
    out = np.zeros(10_007 * 32, np.float32)
    core.module().dequantize("Q5_0", data, out, threads)
    assert_same_bits(out, dequantize_numpy(data, "Q5_0"))


@needs_core
def test_data_may_start_anywhere() -> None:
    data = np.concatenate([np.zeros(1, np.uint8), random_blocks("Q4_K", 3)])[1:]
    assert_same_bits(dequantize(data, "Q4_K"), dequantize_numpy(data.copy(), "Q4_K"))


@needs_core
@pytest.mark.parametrize(
    ("kind", "nbytes", "elements", "message"),
    [
        ("Q4_0", 17, 32, "same number of whole blocks"),
        ("Q4_0", 36, 32, "same number of whole blocks"),
        ("Q4_0", 18, 64, "same number of whole blocks"),
        ("Q4_0", 18, 33, "same number of whole blocks"),
        ("Q9_9", 18, 32, "unknown tensor type Q9_9"),
    ],
)
def test_mismatched_sizes_are_refused(kind: str, nbytes: int, elements: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core.module().dequantize(kind, np.zeros(nbytes, np.uint8), np.zeros(elements, np.float32), 1)


@needs_core
def test_wrong_arrays_are_refused() -> None:
    data, out = np.zeros(36, np.uint8), np.zeros(64, np.float32)
    for bad_data, bad_out in (
        (data[::2], out[:32]),
        (data.view(np.int8), out),
        (data, out.astype(np.float64)),
        (data, out[::2]),
    ):
        with pytest.raises(TypeError):
            core.module().dequantize("Q4_0", bad_data, bad_out, 1)
    out.flags.writeable = False
    with pytest.raises(TypeError):
        core.module().dequantize("Q4_0", data, out, 1)


@pytest.mark.parametrize("built", [True, False], ids=["native", "numpy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_1", "Q6_K"])
def test_tensors_are_rounded_from_float32(kind: str, dtype: torch.dtype, built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several chunks, the last one partly filled, with either implementation."""
    if not built:
        monkeypatch.setattr(core, "available", lambda: False)
    elif not core.available():
        pytest.skip(core.reason())
    monkeypatch.setattr(decode, "CHUNK", 512)
    rows = random_blocks(kind, 5 * 768 // KINDS[kind].block).reshape(5, -1)
    values = torch.from_numpy(dequantize_numpy(rows, kind)).reshape(5, 3, 256)
    tensor = to_torch(rows, kind, (5, 3, 256), dtype)
    assert tensor.dtype is dtype
    torch.testing.assert_close(tensor, values.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_a_copy_is_returned() -> None:
    data = random_blocks("F32", 64).reshape(1, -1)
    before = data.copy()
    to_torch(data, "F32", (64,), torch.float32).zero_()
    np.testing.assert_array_equal(data, before)


def test_whole_numbers_are_refused_as_dtype() -> None:
    with pytest.raises(WeightError, match="not as torch.int8"):
        to_torch(random_blocks("F32", 4).reshape(1, -1), "F32", (4,), torch.int8)
