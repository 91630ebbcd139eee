"""Numbers of the literature that the engine must reproduce to the byte: KV cache, parameters, head shapes, FLOPs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headrace.data.config import LayerConfig, ModelConfig, RopeConfig
from headrace.kv.layout import kv_shape
from headrace.kv.pool import KVPool
from headrace.models.layers import Linear
from headrace.models.reader import windowed
from headrace.models.registry import describe
from headrace.ops.context import FeedRows, build
from headrace.ops.vocabulary import attention, linear
from headrace.weights.loader import Allocator

LLAMA2_7B = ModelConfig(
    architecture="llama",
    vocab_size=32000,
    hidden_size=4096,
    layers=(LayerConfig(heads=32, kv_heads=32, head_dim=128, ffn=11008, rope=RopeConfig()),) * 32,
    max_position=4096,
    tied_head=False,
)


def like(config: ModelConfig, num_layers: int, changes: dict[str, Any], **model: Any) -> ModelConfig:
    """The config with `changes` in each of `num_layers` layers, and others of the model."""
    return replace(config, layers=(replace(config.each_layer, **changes),) * num_layers, **model)


LLAMA2_70B = like(LLAMA2_7B, 80, {"heads": 64, "kv_heads": 8, "ffn": 28672}, hidden_size=8192)
LLAMA31_8B = like(LLAMA2_7B, 32, {"kv_heads": 8, "ffn": 14336}, vocab_size=128256)
OPT_13B = like(LLAMA2_7B, 40, {"heads": 40, "kv_heads": 40}, hidden_size=5120)  # its KV shape is all we use
GEMMA3_1B = windowed(
    like(
        LLAMA2_7B, 26, {"heads": 4, "kv_heads": 1, "head_dim": 256}, architecture="gemma3_text", hidden_size=1152, qk_norm=True
    ),
    [512 if (i + 1) % 6 else None for i in range(26)],
)
GIB, MIB, KIB = 2**30, 2**20, 2**10


@pytest.mark.parametrize(
    ("config", "per_token"),
    [(LLAMA2_7B, 524288), (LLAMA2_70B, 327680), (LLAMA31_8B, 131072), (OPT_13B, 819200), (GEMMA3_1B, 26624)],
)
def test_kv_bytes_per_token(config: ModelConfig, per_token: int) -> None:
    """Card A2's table in 16-bit elements, and the pool takes exactly what the formula says."""
    assert kv_shape(config).block_bytes(1, 2) == per_token
    pool = KVPool(config, num_blocks=3, block_size=2, dtype=torch.bfloat16, device="meta")
    assert pool.bytes == 3 * 2 * per_token


def test_w28_seven_billion_parameters() -> None:
    """13.48 GB (decimal) = 12.55 GiB in float16; 512 KiB a token, 512 MiB at 1,024 tokens, 2 GiB at 4,096."""
    parameters = describe(LLAMA2_7B).num_parameters
    assert parameters == 6_738_415_616
    assert round(2 * parameters / 1e9, 2) == 13.48
    assert round(2 * parameters / GIB, 2) == 12.55
    assert [kv_shape(LLAMA2_7B).block_bytes(tokens, 2) for tokens in (1, 1024, 4096)] == [512 * KIB, 512 * MIB, 2 * GIB]


def test_w1_a_prompt_of_1000_takes_the_time_of_13_steps() -> None:
    """Llama-2-7B on an A100: half of 312 TFLOP/s, 2.04 TB/s."""
    parameters = describe(LLAMA2_7B).num_parameters

    def flop(tokens: int) -> int:
        return 2 * parameters * tokens + 2 * LLAMA2_7B.num_layers * tokens**2 * LLAMA2_7B.hidden_size

    prompt, step = flop(1000) / 156e12, 2 * parameters / 2.04e12
    assert round(flop(1000) / 1e12, 1) == 13.7
    assert round(1000 * prompt) == 88
    assert int(prompt / step) == 13
    assert round(flop(100_000) / 1e15) == 4
    assert round(flop(100_000) / 156e12) == 25


def test_w29_kv_heads_count_not_query_heads() -> None:
    """Llama-2-70B: 320 KiB a token; the formula with all heads would say 2,560 KiB."""
    assert kv_shape(LLAMA2_70B).block_bytes(1, 2) == 320 * KIB
    assert kv_shape(like(LLAMA2_70B, 80, {"kv_heads": 64})).block_bytes(1, 2) == 2560 * KIB


def test_w29_sliding_layers_need_their_window_only() -> None:
    """Gemma 3 1B at 4,096 tokens: 4 full layers need all of them, 22 need 512. Pools of their own hold that and no more."""
    reached = sum(
        kv_shape(replace(GEMMA3_1B, layers=(layer,))).block_bytes(layer.window or 4096, 2) for layer in GEMMA3_1B.layers
    )
    assert reached == 2 * 256 * 2 * (4 * 4096 + 22 * 512)
    pool = KVPool(GEMMA3_1B, num_blocks=256, block_size=16, dtype=torch.bfloat16, device="meta")
    assert pool.bytes == 4096 * kv_shape(GEMMA3_1B).block_bytes(1, 2) > 2 * reached
    pool = KVPool(GEMMA3_1B, 256, 16, torch.bfloat16, "meta", window=512, window_blocks=512 // 16)
    assert pool.bytes == reached


def _attention_weights(hidden: int, heads: int, kv_heads: int) -> tuple[ModelConfig, Linear, Linear]:
    """Created qkv and output projections of one layer."""
    dim = hidden // heads
    config = like(LLAMA2_7B, 1, {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}, hidden_size=hidden)
    qkv = Linear(hidden, config.each_layer.qkv, split=True)
    out = Linear(config.each_layer.q_size, hidden)
    for holder in (qkv, out):
        holder.create(Allocator(torch.float32))
        torch.nn.init.normal_(holder.weight)
    return config, qkv, out


@pytest.mark.parametrize(("kv_heads", "shape"), [(8, (8, 96)), (2, (2, 96)), (1, (1, 96))])
def test_w33_shapes_of_768_in_eight_heads(kv_heads: int, shape: tuple[int, int]) -> None:
    """Q is (rows, 8, 96) always; K and V are (rows, 8, 96), (rows, 2, 96) or (rows, 96); and there is an output projection."""
    config, qkv, out = _attention_weights(768, 8, kv_heads)
    pool = KVPool(config, 4, 4)
    q, k, v = linear(torch.randn(5, 768), qkv, None)
    assert q.view(5, 8, 96).shape == (5, 8, 96)
    assert k.shape == v.shape == (5, shape[0] * shape[1])
    assert pool.kv(0)[0].shape[2:] == shape
    y = attention(q, k, v, build(pool, [FeedRows([0] * 5, [0, 1])]), 0)
    assert y.shape == (5, 768)
    assert out.weight.shape == (768, 768)


def _flops(hidden: int, heads: int, kv_heads: int, rows: int = 8) -> tuple[int, int]:
    """FLOPs of the projections and of the attention of one layer over `rows` rows."""
    config, qkv, out = _attention_weights(hidden, heads, kv_heads)
    pool = KVPool(config, 2, 8)
    x = torch.randn(rows, hidden)
    with FlopCounterMode(display=False) as projections:
        q, k, v = linear(x, qkv, None)
        linear(x[:, : config.each_layer.q_size], out, None)
    with FlopCounterMode(display=False) as attending:
        attention(q, k, v, build(pool, [FeedRows([0] * rows, [0, 1])]), 0)
    return projections.get_total_flops(), attending.get_total_flops()


def test_w34_mqa_saves_projections_not_attention() -> None:
    """QKᵀ and PV cost the same; Q, K, V and O projections fall to 0.5625 (MQA), 0.625 (GQA-2) of MHA, 0.516 at 4096 / 32."""
    mha, attended = _flops(768, 8, 8)
    assert mha == 2 * 8 * 4 * 768 * 768
    assert attended == 2 * (2 * 8 * 8 * 8 * 96)  # two products, 8 rows by 8 keys, 8 heads of 96
    for kv_heads, ratio in ((1, 0.5625), (2, 0.625)):
        projections, attention_flops = _flops(768, 8, kv_heads)
        assert projections / mha == ratio
        assert attention_flops == attended
    assert round(_flops(4096, 32, 1)[0] / _flops(4096, 32, 32)[0], 3) == 0.516
