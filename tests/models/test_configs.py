"""ModelConfig from config.json as it is published, and from GGUF metadata; what is not built is refused in one line."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.data.config import LayerConfig, RopeConfig
from headrace.models.families import FAMILIES
from headrace.models.layers import frequencies
from headrace.models.registry import MODELS, read_config
from headrace.startup.opening import open_model
from headrace.weights.source import WeightError
from tests.models.zoo import MemorySource
from tests.tiny_bert import write_tiny_bert

LLAMA31_8B: dict[str, Any] = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MISTRAL_7B = {
    **{key: value for key, value in LLAMA31_8B.items() if key != "rope_scaling"},
    "model_type": "mistral",
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN25_05B = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
GGUF_GEMMA3: dict[str, Any] = {
    "general.architecture": "gemma3",
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 1152,
    "gemma3.block_count": 26,
    "gemma3.feed_forward_length": 6912,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.sliding_window": 512,
    "gemma3.rope.freq_base": 1000000.0,
}


def hf(settings: dict[str, Any]) -> MemorySource:
    return MemorySource("safetensors", {}, settings)


def gguf(settings: dict[str, Any], **tensors: torch.Tensor) -> MemorySource:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return MemorySource("gguf", {"token_embd.weight": torch.ones(300, 8), **named}, settings)


def test_llama_31() -> None:
    config = read_config(hf(LLAMA31_8B))
    layer = config.each_layer
    assert (layer.kv_heads, layer.head_dim, layer.q_size, layer.kv_size) == (8, 128, 4096, 1024)
    assert layer.rope == RopeConfig(500000.0, None, "llama3", 8.0, 1.0, 4.0, 8192)
    assert (config.num_layers, config.tied_head, config.qkv_bias, layer.window) == (32, False, False, None)


def test_mistral_slides_in_every_layer() -> None:
    config = read_config(hf(MISTRAL_7B))
    assert config.each_layer.window == 4096
    assert read_config(hf({**MISTRAL_7B, "sliding_window": None})).each_layer.window is None


def test_qwen2_has_biases_and_a_window_only_if_configured() -> None:
    config = read_config(hf(QWEN25_05B))
    assert (config.qkv_bias, config.out_bias, config.tied_head, config.each_layer.window) == (True, False, True, None)
    slid = read_config(hf({**QWEN25_05B, "use_sliding_window": True}))
    assert [slid.layers[i].window for i in (20, 21)] == [None, 32768]


def test_gemma3_from_both_containers() -> None:
    config, other = read_config(hf(GEMMA3_1B)), read_config(gguf(GGUF_GEMMA3))
    for made in (config, other):
        assert [i for i in range(26) if made.layers[i].window is None] == [5, 11, 17, 23]
        assert [made.layers[i].rope for i in (4, 5)] == [RopeConfig(10000.0), RopeConfig(1000000.0)]
        assert made.attn_scale == 1 / 16
        with pytest.raises(ValueError, match="not all alike"):
            made.each_layer  # noqa: B018
        assert (made.embed_scale, made.tied_head, made.architecture) == (1152**0.5, True, "gemma3_text")
    scaled = {**GGUF_GEMMA3, "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    made = read_config(gguf(scaled))
    assert made.layers[5].rope == RopeConfig(1000000.0, scaling="linear", factor=8.0)
    assert made.layers[4].rope == RopeConfig(10000.0)


def test_gemma3_27b_in_gguf_scales_queries_by_hidden_over_heads() -> None:
    big = {**GGUF_GEMMA3, "gemma3.block_count": 62, "gemma3.embedding_length": 5376, "gemma3.attention.head_count": 32}
    assert read_config(gguf({**big, "gemma3.attention.head_count_kv": 16})).attn_scale == 168**-0.5


def test_gpt2() -> None:
    config = read_config(hf(GPT2))
    assert config.each_layer == LayerConfig(12, 12, 64, ffn=3072)
    assert (config.qkv_bias, config.tied_head) == (True, True)


def test_old_and_new_rope_settings_give_the_same_config() -> None:
    old = read_config(hf(LLAMA31_8B))
    new = {key: value for key, value in LLAMA31_8B.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **LLAMA31_8B["rope_scaling"]}
    assert read_config(hf(new)) == old


def test_llama3_divisors_of_gguf_give_the_same_frequencies() -> None:
    """Card values: 64 pairs of Llama 3.1; fast pairs stay, slow ones are divided by 8, a few lie between."""
    rope = RopeConfig(500000.0, None, "llama3", 8.0, 1.0, 4.0, 8192)
    scaled, plain = frequencies(rope, 128), frequencies(RopeConfig(500000.0), 128)
    divisors = plain / scaled
    assert (divisors[0], divisors[-1]) == (1.0, 8.0)
    assert 0 < int(((divisors > 1.001) & (divisors < 7.999)).sum()) < 20
    settings = {key.replace("gemma3.", "llama."): value for key, value in GGUF_GEMMA3.items()}
    settings |= {"general.architecture": "llama", "llama.rope.freq_base": 500000.0}
    settings |= {"llama.attention.key_length": 128, "llama.attention.value_length": 128}
    made = read_config(gguf(settings, rope_freqs__weight=torch.from_numpy(divisors))).each_layer.rope
    assert made is not None
    np.testing.assert_allclose(frequencies(made, 128), scaled, rtol=1e-7)  # a file holds float32


def test_proportional_scaling_rotates_a_share_of_the_pairs() -> None:
    """The pairs of a whole head, of which the first quarter turn, half as fast."""
    scaling = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0}
    rope = read_config(hf({**LLAMA31_8B, "rope_scaling": scaling})).each_layer.rope
    assert rope is not None
    assert rope.dim is None
    expected = frequencies(RopeConfig(500000.0), 128) / 2
    expected[16:] = 0
    np.testing.assert_allclose(frequencies(rope, 128), expected, rtol=1e-15)


def test_dynamic_scaling_changes_nothing_within_the_context() -> None:
    scaled = read_config(hf({**LLAMA31_8B, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}))
    assert scaled == read_config(hf({**LLAMA31_8B, "rope_scaling": None}))


def test_a_given_scaling_is_that_of_a_config_that_has_it() -> None:
    """Qwen's card tells users to write this yarn setting into config.json; without it the config is plain."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    stated = read_config(hf({**QWEN25_05B, "rope_scaling": yarn}))
    assert read_config(hf(QWEN25_05B), "yarn:4") == replace(stated, max_position=131072)
    assert read_config(hf(QWEN25_05B), "yarn:3") != replace(stated, max_position=98304)
    linear = {"rope_type": "linear", "factor": 2.0}
    stated = read_config(hf({**MISTRAL_7B, "rope_scaling": linear}))
    assert read_config(hf(MISTRAL_7B), "linear:2") == replace(stated, max_position=262144)


@pytest.mark.parametrize(
    ("config", "value", "message"),
    [
        (QWEN25_05B, "yarn", "rope 'yarn': give a kind \\(linear or yarn\\) and a factor above 1"),
        (QWEN25_05B, "ntk:4", "rope 'ntk:4': give a kind"),
        (QWEN25_05B, "yarn:1", "a factor above 1 and up to 64"),
        (QWEN25_05B, "yarn:nan", "a factor above 1 and up to 64"),
        (QWEN25_05B, "yarn:65", "a factor above 1 and up to 64"),
        (LLAMA31_8B, "yarn:4", "rope yarn:4: the model's files give it a scaling \\(llama3\\); leave rope out"),
        (GPT2, "yarn:4", "rope yarn:4: a gpt2 model has no rotary positions; leave rope out"),
    ],
)
def test_a_scaling_that_cannot_be_used_is_refused(config: dict[str, Any], value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(hf(config), value)


def test_divisors_of_another_head_size_are_refused() -> None:
    settings = {key.replace("gemma3.", "llama."): value for key, value in GGUF_GEMMA3.items()}
    source = gguf({**settings, "general.architecture": "llama"}, rope_freqs__weight=torch.ones(3))
    with pytest.raises(WeightError, match="has 3 rotary divisors and needs 128"):
        read_config(source)


SU = {"short_factor": [1.0] * 64, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {**LLAMA31_8B, "rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
            "rotary scaling 'ntk'; known are default",
        ),
        (
            {**LLAMA31_8B, "quantization_config": {"quant_method": "gptq"}},
            "config.json has weights quantised by 'gptq', which is not supported",
        ),
        ({**LLAMA31_8B, "hidden_act": "relu"}, "has the activation 'relu'; llama is built with silu"),
        ({**LLAMA31_8B, "hidden_size": None}, "must have hidden_size as an integer from 1 to 2147483647, not None"),
        ({**LLAMA31_8B, "num_hidden_layers": -1}, "must have num_hidden_layers as an integer from 1 to 1024, not -1"),
        ({**LLAMA31_8B, "num_hidden_layers": 10**9}, "from 1 to 1024, not 1000000000"),
        ({**LLAMA31_8B, "rms_norm_eps": "small"}, "must have rms_norm_eps as a number above 0, not 'small'"),
        ({**LLAMA31_8B, "rms_norm_eps": math.nan}, "must have rms_norm_eps as a number above 0, not nan"),
        ({**LLAMA31_8B, "head_dim": 7}, "turns 7 values of heads of 7; rotary needs an even number"),
        ({**LLAMA31_8B, "rope_scaling": {**LLAMA31_8B["rope_scaling"], "low_freq_factor": 4.0}}, "not below its high_freq"),
        ({**LLAMA31_8B, "num_key_value_heads": 5}, "has 32 heads for 5 KV heads"),
        ({**LLAMA31_8B, "sliding_window": 4096}, "is it a mistral?"),
        ({**LLAMA31_8B, "use_bidirectional_attention": True}, "asks for use_bidirectional_attention"),
        ({**QWEN25_05B, "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types for its 24 layers"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "asks for scale_attn_by_inverse_layer_idx"),
        (
            {"model_type": "mixtral", "num_local_experts": 8},
            "has layers of 8 experts, which are not built; take a model without",
        ),
        ({}, "unknown architecture ''; known are"),
        ({"model_type": "gemma3n"}, "gemma3n is not supported, Headrace lacks inputs for each layer"),
        (
            {"model_type": "qwen4_exp"},
            "qwen4_exp is not supported, Headrace lacks learned sparse attention; supported are arcee",
        ),
        ({"model_type": "mistral3"}, "mistral3 is not supported, Headrace lacks its images; take the text model's GGUF file"),
        ({**LLAMA31_8B, "layer_types": ["full_attention"]}, "must have layer_types for its 32 layers"),
        ({**LLAMA31_8B, "layer_types": ["linear_attention"] * 32}, "each sliding_attention or full_attention"),
        (
            {**LLAMA31_8B, "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            "must have original_max_position_embeddings as an integer",
        ),
        (
            {**LLAMA31_8B, "model_type": "phi3", "rope_scaling": {"type": "su", **SU, "long_factor": [1.0, "2"]}},
            "must have long_factor as a list of numbers above 0",
        ),
        (
            {**LLAMA31_8B, "model_type": "phi3", "rope_scaling": {"type": "su", **SU, "long_factor": [1.0] * 3}},
            "has 3 rotary divisors and needs 64, all above 0",
        ),
        (
            {**LLAMA31_8B, "model_type": "phi3", "rope_scaling": {"type": "su", **SU, "original_max_position_embeddings": 1}},
            "must have original_max_position_embeddings as an integer from 2 to 2147483647, not 1",
        ),
        (
            {**LLAMA31_8B, "rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "has a yarn rotary scaling, whose base must be above 1, not 1",
        ),
        ({**LLAMA31_8B, "model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers as a list of 0 and 1"),
        ({**LLAMA31_8B, "model_type": "granite", "residual_multiplier": 0}, "residual_multiplier as a number above 0, not 0"),
    ],
)
def test_unsupported_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightError) as caught:
        read_config(hf(settings))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_in_a_model_folder_is_not_run(tmp_path: Path) -> None:
    """Settings that make other libraries import a file of the folder, or fetch one, are settings like others here."""
    folder, ran = write_tiny_bert(tmp_path / "model"), tmp_path / "ran"
    before = sorted(sys.modules)
    for name in ("evil.py", "modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "conftest.py", "__init__.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w').close()\n")
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    more = {
        "auto_map": dict.fromkeys(classes, "evil.Evil"),
        "_attn_implementation": "evil/repository",
        "_attn_implementation_internal": "evil/repository",
        "trust_remote_code": True,
        "custom_pipelines": {"evil": {"impl": "evil.Evil"}},
    }
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        file = folder / name
        file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **more}))
    opened = open_model(folder)
    assert opened.config.encoder
    assert opened.tokenizer.encode("the water")
    assert not ran.exists()
    assert [name for name in sys.modules if "evil" in name and name not in before] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "nameless"}, "unknown architecture 'nameless'; known are"),
        ({"general.architecture": "mamba"}, "mamba is not supported, Headrace lacks layers with a state"),
        ({"general.architecture": "deepseek2"}, "deepseek2 is not supported, Headrace lacks attention with latent keys"),
        ({"general.architecture": "mistral"}, "GGUF files of Mistral say 'llama'; convert the model again"),
        ({"general.architecture": "mpnet"}, "MPNet is read from safetensors"),
        ({"gemma3.block_count": None}, "must have gemma3.block_count as an integer from 1 to 1024, not None"),
        ({"gemma3.attention.value_length": 128}, "different widths"),
        ({"gemma3.expert_count": 8}, "has layers of 8 experts, which are not built; take a model without experts"),
        ({"general.architecture": "qwen3moe", "qwen3moe.expert_count": 128}, "has layers of 128 experts, which are not built"),
        ({"gemma3.rope.scaling.type": "ntk"}, "rotary scaling 'ntk'; known are none, linear, yarn, longrope, llama3"),
        ({"gemma3.rope.freq_base": "fast"}, "must have gemma3.rope.freq_base as a number above 0, not 'fast'"),
        (
            {"gemma3.attention.head_count": np.arange(100)},
            "gemma3.attention.head_count as an integer from 1 to 2147483647, not a list",
        ),
        ({"gemma3.rope.dimension_count": 512}, "turns 512 values of heads of 256"),
    ],
)
def test_gguf_metadata_that_cannot_be_used_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightError) as caught:
        read_config(gguf({**GGUF_GEMMA3, **changes}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_that_only_grok_reads_are_no_reason_to_refuse() -> None:
    """llama.cpp's converter writes an `attention_factor` of any family with YaRN under a key that Grok's loader alone reads."""
    others = {"attention.temperature_length": 8192, "rope.scaling.yarn_attn_factor": 1.2, "rope.scaling.yarn_ext_factor": 0.5}
    changed = {**GGUF_GEMMA3, **{f"gemma3.{key}": value for key, value in others.items()}}
    assert read_config(gguf(changed)) == read_config(gguf(GGUF_GEMMA3))


def test_a_file_with_only_a_vocabulary_is_refused() -> None:
    for architecture in ("gemma3", "falcon"):
        with pytest.raises(WeightError, match="holds a vocabulary and no weights; take the model's own .gguf file"):
            read_config(MemorySource("gguf", {}, {**GGUF_GEMMA3, "general.architecture": architecture}))


def test_every_family_has_a_model_file_and_every_model_file_a_family() -> None:
    assert {family.shape for family in FAMILIES.values()} == set(MODELS)
    assert {name: family.architecture for name, family in FAMILIES.items()} == {name: name for name in FAMILIES}
