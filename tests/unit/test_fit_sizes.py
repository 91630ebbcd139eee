"""Bytes of `headrace fit`: the formulas against the memory plan, the packer, the pool and the lowering, and worked numbers."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import core
from headrace.backends import memory
from headrace.backends.native import lowering
from headrace.backends.native.program import KV_DTYPES, pool_block_bytes, thread_pool
from headrace.backends.native.weights import PackedWeights, packed_bytes
from headrace.kv.layout import KV_FORMATS, kv_shape
from headrace.models.registry import describe, read_config
from headrace.parallel.pipeline.cut import cut_layers
from headrace.runner.record import record
from headrace.startup.fit import sizes
from headrace.startup.fit.headers import open_shape
from headrace.startup.fit.shapes import Matrix, ModelShape, shape_of
from headrace.startup.fit.sizes import Layout, Load, bytes_of, heads_of, share
from headrace.weights.source import WeightError
from tests.models import zoo
from tests.tiny import tiny_config
from tests.tiny_native import native_model, source_of

pytestmark = pytest.mark.skipif(not core.available(), reason="the packed sizes are the core's")

LLAMA2_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA2_70B = {
    **LLAMA2_7B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8,
}  # fmt: skip
LLAMA31_8B = {
    **LLAMA2_7B, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip
OPT_13B = {
    "model_type": "opt", "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40, "num_attention_heads": 40,
    "vocab_size": 50272, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
MAMBA = {
    "model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "state_size": 16, "expand": 2, "conv_kernel": 4,
    "vocab_size": 50280, "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM2 = {
    **LLAMA2_7B, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


def shape(tmp_path: Path, keys: dict[str, Any], weights: str = "", quantize: str = "") -> ModelShape:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(keys))
    return open_shape(str(path), weights, quantize)


@pytest.mark.parametrize(
    ("keys", "token"),
    [(LLAMA2_7B, 524288), (LLAMA2_70B, 327680), (LLAMA31_8B, 131072), (OPT_13B, 819200), (DEEPSEEK_V3, 70272)],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_w28_w29_kv_bytes_of_a_token(tmp_path: Path, keys: dict[str, Any], token: int) -> None:
    """The table of the literature. The 70B model has 8 KV heads: with its 64 query heads the number would be 8 times larger."""
    found = shape(tmp_path, keys)
    assert found.kv_block_bytes() == 16 * token
    if keys is LLAMA2_70B:
        wrong = replace(found, layers=tuple(replace(layer, kv_heads=layer.heads) for layer in found.layers))
        assert wrong.kv_block_bytes() == 8 * 16 * token


def test_parameters_and_weights_of_published_models(tmp_path: Path) -> None:
    """6.74, 671 and 2.77 billion, of which a token of DeepSeek-V3 uses 37; 12.55 GiB in 16 bits."""
    seven = shape(tmp_path, LLAMA2_7B)
    assert seven.weights_bytes == 2 * 6_738_415_616 + 2 * 4096 * 65  # norms have 4 bytes
    assert seven.multiplied == 6_607_077_376
    deepseek = shape(tmp_path, DEEPSEEK_V3)
    assert (round(deepseek.parameters / 1e9), round(deepseek.multiplied / 1e9)) == (671, 37)
    assert "256 experts" in deepseek.refusal
    assert deepseek.config is None
    mamba = shape(tmp_path, MAMBA)
    assert mamba.parameters / 1e9 == pytest.approx(2.77, rel=0.01)
    assert mamba.kv_block_bytes() == 0
    assert mamba.state_bytes == 64 * 4 * 5120 * (16 + 3)


def test_a_latent_vector_is_not_divided_by_ranks(tmp_path: Path) -> None:
    """K/V of a rank: 1/8 of the heads of Llama, all of the latent vectors of DeepSeek."""
    load = Load(4096, 4)
    for keys, divided in ((LLAMA2_70B, True), (DEEPSEEK_V3, False)):
        found = shape(tmp_path, keys)
        whole = bytes_of(found, load).kv
        parts = [bytes_of(found, load, Layout(tp=8), rank).kv for rank in range(8)]
        assert parts == [whole // 8 if divided else whole] * 8


@pytest.mark.parametrize("name", zoo.CONFIGS)
@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_the_formulas_are_the_plan_and_the_allocators(name: str, kv_dtype: str) -> None:
    """Weights as the packer lays them out, K/V as the plan and the pool count them, for every tiny model."""
    source = zoo_source(name)
    config = read_config(source)
    found = shape_of(config, source, name)
    assert found.weights_bytes == packed_bytes(describe(config), source) == found.matched_bytes
    layers, heads, head_dim = kv_shape(config)
    whole = core.module().KVPool.block_bytes(layers, 16, heads, head_dim, KV_DTYPES[kv_dtype])
    assert found.kv_block_bytes(kv_dtype) == whole == sum(pool_block_bytes(config, 16, kv_dtype))
    load = Load(200, 3, kv_dtype=kv_dtype)
    planned = memory.plan(
        config, block_bytes=whole, block_size=16, free=1 << 30, max_num_seqs=3, kv_cache_memory=bytes_of(found, load).kv
    )
    assert planned.num_blocks == 3 * 13 == load.blocks
    assert planned.kv_bytes == bytes_of(found, load).kv


def zoo_source(name: str) -> zoo.MemorySource:
    model = zoo.oracle(name)
    return zoo.MemorySource("safetensors", dict(model.state_dict()), model.config.to_dict())


@pytest.mark.parametrize("share_of", [1, 2])
def test_layers_that_share_kv_have_no_kv_bytes(share_of: int) -> None:
    config = tiny_config(num_layers=4, share=share_of)
    model = native_model("llama", num_layers=4, share=share_of)
    found = shape_of(config, source_of(model), "tiny")
    assert found.kv_block_bytes() == sum(pool_block_bytes(config, 16)) == 4 // share_of * 2 * 16 * 2 * 16 * 2


class Recorded:
    """A program that remembers its buffers."""

    def __init__(self, program: Any) -> None:
        self.program, self.segment, self.buffers = program, "", list[tuple[str, str, int]]()

    def buffer(self, kind: str, width: int, local: bool = False) -> int:
        self.buffers.append((self.segment, kind, width))
        return int(self.program.buffer(kind, width, local))

    def begin(self, segment: str) -> None:
        self.segment = segment
        self.program.begin(segment)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)


@pytest.mark.parametrize("quantize", ["", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("head_dim", [8, 32])
def test_buffers_equal_those_of_the_lowering(
    architecture: str, quantize: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Recorded] = []

    def program(*arguments: Any) -> Recorded:
        made.append(Recorded(core.module().Program(*arguments)))
        return made[-1]

    module = SimpleNamespace(**{name: getattr(core.module(), name) for name in dir(core.module()) if name[:1] != "_"})
    module.Program = program
    monkeypatch.setattr(lowering, "core", SimpleNamespace(module=lambda: module))
    model = native_model(architecture, head_dim=head_dim)
    pool, heads = thread_pool(1), kv_shape(model.config)
    weights = PackedWeights(model, source_of(model), pool, quantize)
    kv = core.module().KVPool(heads.layers, 8, 16, heads.heads, heads.head_dim, "bf16")
    lowering.lower(record(model), weights, model.config, pool=pool, kv=kv, max_positions=256)
    found = shape_of(model.config, source_of(model), "tiny", quantize)
    buffers = made[0].buffers
    assert sorted(sizes.layer_buffers(found)) == sorted((kind, width) for segment, kind, width in buffers if segment == "layer")
    assert [kind for segment, kind, _ in buffers if segment == "head"] == ["a8" if quantize else "bf16", "float", "float"]


def test_a_buffer_takes_whole_rows_and_pages() -> None:
    """1,536 floats are 3 · 512, which would share cache sets: 16 more. From 2 MiB on whole large pages."""
    assert sizes.reserved("float", 1536, 1) == 4 * 1552
    assert sizes.reserved("float", 97, 3) == 3 * 112 * 4
    assert sizes.reserved("a8", 65, 1) == -(-2 * 104 // 64) * 64
    assert sizes.reserved("bf16", 64, 512) == 512 * 128
    assert sizes.reserved("float", 1536, 512) == 2 * (2 << 20)


def test_shares_of_the_design(tmp_path: Path) -> None:
    """9 query heads on 3 KV heads: tp 4 keeps 5 KV heads; 35 blocks of 256 columns: the middle one is held twice."""
    layer = shape(tmp_path, SMOLLM2).layers[0]
    for tp, heads, kv in ((2, [4, 5], 4), (4, [2, 2, 2, 3], 5)):
        ranks = [heads_of(layer, tp, rank) for rank in range(tp)]
        assert [len(each) for each, _ in ranks] == heads
        assert sum(len(each) for _, each in ranks) == kv
    assert [len(share(24, 4, rank)) for rank in range(4)] == [6] * 4
    down = Matrix("Q4_K", "", 1536, 8960)
    halves = [range(4480), range(4480, 8960)]
    assert down.block_columns == 256
    assert sum(down.nbytes(columns=half) for half in halves) * 35 == down.nbytes() * 36


@pytest.mark.parametrize("keys", [SMOLLM2, LLAMA2_7B, LLAMA31_8B, DEEPSEEK_V3], ids=lambda keys: keys["model_type"])
@pytest.mark.parametrize("layout", [Layout(2), Layout(4), Layout(8), Layout(2, 2), Layout(1, 4)], ids=str)
def test_ranks_together_hold_the_model(tmp_path: Path, keys: dict[str, Any], layout: Layout) -> None:
    """Every byte of weights is held; copies are vectors, KV heads that ranks share, and a tied head on the last stage."""
    found = shape(tmp_path, keys, "Q8_0")
    whole = bytes_of(found, Load(1024))
    ranks = [bytes_of(found, Load(1024), layout, rank, stage) for stage in range(layout.pp) for rank in range(layout.tp)]
    assert whole.weights <= sum(each.weights for each in ranks)
    copied = found.head.nbytes / layout.tp if layout.pp > 1 and found.tied else 0
    assert max(each.weights for each in ranks) < copied + 1.35 * whole.weights / (layout.tp * layout.pp)
    assert whole.kv <= sum(each.kv for each in ranks)


def test_layouts_that_cannot_be(tmp_path: Path) -> None:
    smol = shape(tmp_path, SMOLLM2)
    for arguments, message in (
        ({"tp": 3}, "--tp 3: must be 1, 2, 4 or 8"),
        ({"pp": 0}, "--pp 0: must be 1 or more"),
        ({"replicas": -1}, "--replicas -1: must be 1 or more"),
        ({"pp": 2, "cut": (30,)}, "1 stages are named and --pp is 2"),
    ):
        with pytest.raises(ValueError, match=message):
            Layout(**arguments)  # type: ignore[arg-type]
    for layout, message in (
        (Layout(pp=31), "--pp 31: .* has 30 layers"),
        (Layout(pp=2, cut=(10, 10)), r"stages of 10\+10 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            sizes.check_layout(smol, layout)
    with pytest.raises(ValueError, match="--tp 8: .* has 4 heads"):
        sizes.check_layout(shape(tmp_path, {**SMOLLM2, "num_attention_heads": 4, "num_key_value_heads": 4}), Layout(tp=8))
    for arguments, message in (({"context": -5}, "--context -5"), ({"context": 5, "batch": 0}, "--batch 0")):
        with pytest.raises(ValueError, match=message):
            Load(**arguments)


def test_stages_are_even_and_keep_shared_kv_together(tmp_path: Path) -> None:
    """They are those that a pipeline runs. A layer that reads another's K/V is never cut from it."""
    assert [len(stage) for stage in sizes.stages(shape(tmp_path, LLAMA2_7B), Layout(pp=4))] == [8, 8, 8, 8]
    assert [len(stage) for stage in sizes.stages(shape(tmp_path, SMOLLM2), Layout(pp=2))] == [15, 15]
    config = tiny_config(num_layers=4, share=2)
    for family in ("llama", "qwen3", "gpt2"):
        other = tiny_config(family, num_layers=7)
        planned = sizes.stages(shape_of(other, source_of(native_model(family, num_layers=7)), "tiny"), Layout(pp=3))
        assert planned == [stage.layers for stage in cut_layers(other, 3)]
    found = shape_of(config, source_of(native_model("llama", num_layers=4, share=2)), "tiny")
    assert [list(stage) for stage in sizes.stages(found, Layout(pp=2))] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="3 stages: the layers that share K/V"):
        sizes.stages(found, Layout(pp=3))


def test_configs_that_lack_keys(tmp_path: Path) -> None:
    for keys, message in (
        ({"model_type": "llama"}, "has no hidden_size; use the config.json of a language model"),
        ({**LLAMA2_7B, "model_type": "new", "vocab_size": "many"}, "vocab_size must be an integer"),
        ({**LLAMA2_7B, "model_type": "new", "num_key_value_heads": 5}, "32 heads for 5 KV heads"),
        ({**DEEPSEEK_V3, "num_experts_per_tok": 300}, "uses 300 of 256 experts"),
        ({**DEEPSEEK_V3, "num_hidden_layers": 10**6}, "has 1000000 layers"),
    ):
        with pytest.raises(WeightError, match=message):
            shape(tmp_path, keys)
    with pytest.raises(ValueError, match="--weights Q9: unknown number format; use one of Q2_K"):
        shape(tmp_path, LLAMA2_7B, "Q9")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WeightError, match="is not a JSON object"):
        open_shape(str(tmp_path / "config.json"))


def test_groups_of_a_quantised_config_and_vectors_of_state(tmp_path: Path) -> None:
    """GPTQ with 4 bits by 128 is a format of the core; a matrix of 4,096 columns then takes 4.2 bits a weight."""
    keys = {**LLAMA2_7B, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    found = shape(tmp_path, keys)
    assert {part.kind for layer in found.layers for linear in layer.linears for part in linear.parts} == {"G4_128"}
    assert found.head.parts[0].kind == "BF16"
    assert shape(tmp_path, LLAMA2_7B, "BF16", "int8").layers[0].linears[0].parts[0].label == "Q8_0"
