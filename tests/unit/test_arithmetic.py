"""What a token costs, against worked numbers of the literature."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.backends.native.program import pool_block_bytes
from headrace.compress.grids.arithmetic import Cost, kv_token_bytes
from headrace.compress.grids.encode import encode
from headrace.data.config import LayerConfig, ModelConfig, RopeConfig
from headrace.kv.layout import KV_FORMATS
from headrace.weights.decode import dequantize_numpy
from headrace.weights.kinds import FLOATS, KINDS

LAYER = LayerConfig(heads=32, kv_heads=32, head_dim=128, ffn=11008, rope=RopeConfig())
LLAMA2_7B = ModelConfig("llama", vocab_size=32000, hidden_size=4096, layers=(LAYER,) * 32, max_position=4096, tied_head=False)
PARAMETERS, TABLE = 6_738_415_616, 32000 * 4096
A100, A100_SPEED = 2.039e12, 312e12  # bytes/s, operations/s in 16 bits
H100, H100_SPEED = 3.35e12, 989e12


def seven_billion(bits: float) -> Cost:
    multiplied = PARAMETERS - TABLE
    return Cost(PARAMETERS, round(PARAMETERS * bits / 8), multiplied, round(multiplied * bits / 8), kv_token_bytes(LLAMA2_7B))


def test_kv_of_the_seeds() -> None:
    """Llama-2-7B in 16 bits: 512 KiB a token, 512 MiB at 1,024 tokens, 2 GiB at 4,096; an eighth with 4 KV heads."""
    assert [kv_token_bytes(LLAMA2_7B) * tokens for tokens in (1, 1024, 4096)] == [2**19, 2**29, 2**31]
    grouped = replace(LLAMA2_7B, layers=(replace(LAYER, kv_heads=4),) * 32)
    assert kv_token_bytes(grouped) == 2**16
    assert kv_token_bytes(LLAMA2_7B, "float32") == 2**20


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_kv_bytes_equal_those_of_the_native_pool(kv_dtype: str) -> None:
    assert kv_token_bytes(LLAMA2_7B, kv_dtype) * 16 == sum(pool_block_bytes(LLAMA2_7B, 16, kv_dtype))


def test_w26_where_weights_stop_mattering() -> None:
    """16-bit weights: a batch of about 153 on an A100, 295 on an H100; half as many with 8 bits, a quarter with 4."""
    assert round(seven_billion(16).critical_batch(A100, A100_SPEED)) == 153
    assert round(seven_billion(16).critical_batch(H100, H100_SPEED)) == 295
    for bits in (8, 4):
        assert seven_billion(bits).critical_batch(A100, A100_SPEED) == pytest.approx(153 * bits / 16, rel=0.01)


def test_w38_weights_in_fewer_bits_gain_while_bytes_are_the_limit() -> None:
    """4.5 bits: 3.56 times the tokens at batch 1 without a context, nothing where multiplying is the limit."""
    whole, small = seven_billion(16), seven_billion(4.5)

    def gain(batch: int) -> float:
        return small.ceiling(A100, 0, batch, A100_SPEED) / whole.ceiling(A100, 0, batch, A100_SPEED)

    assert gain(1) == pytest.approx(16 / 4.5)
    assert gain(100) == pytest.approx(153 / 100, rel=0.01)
    assert gain(200) == 1
    assert small.operations == whole.operations == 2 * (PARAMETERS - TABLE)


def test_w58_kv_dominates_the_bytes_of_a_long_context() -> None:
    """At batch 32 with 4,096 tokens each, K and V are 84 % of the bytes; 4-bit weights then give 1.13 times, not 3.56."""
    whole, small = seven_billion(16), seven_billion(4.5)
    kv = 32 * 4096 * whole.kv_bytes
    assert round(kv / whole.step_bytes(4096, 32), 2) == 0.84
    assert round(whole.step_bytes(4096, 32) / small.step_bytes(4096, 32), 2) == 1.13
    assert whole.ceiling(A100, 4096, 32) == pytest.approx(32 * A100 / whole.step_bytes(4096, 32))


def test_a_decoded_token_of_7b_on_an_a100() -> None:
    """13.2 GB in 6.5 ms: 154 tokens/s at most, alone."""
    assert round(seven_billion(16).read_bytes / 1e9, 1) == 13.2
    assert int(seven_billion(16).ceiling(A100, 0)) == 154
    assert seven_billion(4.5).bits == pytest.approx(4.5)


def test_an_unknown_format_of_k_and_v_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown number format 'int3' of K and V; choose float32, bfloat16, int8"):
        kv_token_bytes(LLAMA2_7B, "int3")


def test_w37_single_precision_is_32_bits() -> None:
    """Sixteen bits are half precision or bfloat16: a thousandth (and a hundredth) beside 1 is lost in them."""
    for value, kept in ((1 + 2.0**-20, {"F32"}), (1 + 2.0**-10, {"F32", "F16"}), (1 + 2.0**-7, {"F32", "F16", "BF16"})):
        row = np.full((1, 1), value, np.float32)
        found = {kind for kind in FLOATS if dequantize_numpy(encode(row, kind).reshape(-1), kind)[0] == value}
        assert found == kept
    assert {kind: 8 * KINDS[kind].nbytes for kind in FLOATS} == {"F32": 32, "F16": 16, "BF16": 16}
