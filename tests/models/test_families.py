"""Decoders equal `transformers` in float64 from both kinds of files, and every number of a family matters."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace import core
from headrace.backends.native.offer import TargetSettings, load_target
from headrace.data.plan import MAX_NODES
from headrace.models.base import Model
from headrace.models.registry import read_config
from headrace.startup.fit.headers import open_shape
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model, read_tensor, stored_tensors
from headrace.weights.source import WeightError
from tests.models.feeding import feed
from tests.models.gguf_writer import write_gguf
from tests.models.rotary_rows import ROTARY_FAMILIES, reordered
from tests.models.test_encoders import ROTARY_ENCODERS
from tests.models.test_gguf_models import NOT_IN_GGUF
from tests.models.zoo import (
    CONFIGS,
    GRANITE,
    TWINS,
    YARN,
    MemorySource,
    hf_source,
    in_float64,
    largest_gap,
    oracle,
    oracle_logits,
    prompts,
)

DOUBLE = torch.float64
NAMES = [name for name in CONFIGS if not name.startswith(("llama", "mistral", "qwen", "gemma3", "gpt2"))]
EXACT = 1e-10
SEEN = 1e-4
PROMPTS = prompts(7, (3, 40))
CONTAINERS = ("safetensors", "gguf")


def models(name: str, **changes: Any) -> tuple[Any, list[torch.Tensor]]:
    """A tiny model of `transformers` in float64, and its logits. changes: of its config."""
    with in_float64():
        theirs = oracle(name, DOUBLE, **changes)
        return theirs, oracle_logits(theirs, PROMPTS)


def source_of(theirs: Any, container: str, folder: Path) -> Any:
    return hf_source(theirs) if container == "safetensors" else GGUFFile(write_gguf(theirs, folder / "model.gguf"))


def gap(model: Model, expected: list[torch.Tensor]) -> float:
    return largest_gap(feed(model, PROMPTS, "whole", DOUBLE), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_and_export_is_the_inverse(name: str, tmp_path: Path) -> None:
    theirs, expected = models(name)
    assert float(torch.cat(expected).std()) > 0.3
    # GGUF files have Llama 3's scaling as divisors in float32.
    for container in CONTAINERS[: 1 if name in NOT_IN_GGUF or name == "llama-rope-llama3" else 2]:
        source = source_of(theirs, container, tmp_path)
        model = load_model(source, DOUBLE)
        assert gap(model, expected) <= EXACT, container
        written = stored_tensors(model, container)
        assert written
        for tensor, values in written.items():
            torch.testing.assert_close(values, read_tensor(source, tensor, DOUBLE), rtol=0, atol=1e-15)


# Numbers of Llama's block, which families with other tensors alone have too.
SHARED: dict[str, Any] = {"rope_parameters.rope_theta": 100.0, "rms_norm_eps": 0.05}
LLAMA: dict[str, Any] = {**SHARED, "tie_word_embeddings": True}
GGUF_LLAMA: dict[str, Any] = {"rope.freq_base": 100.0, "attention.layer_norm_rms_epsilon": 0.05}
# A number of a family, and its value for models without it. `full_attention.factor` is inside of rope_parameters.
NEUTRAL: dict[str, dict[str, Any]] = {
    "llama-rope-proportional": {
        "rope_parameters.rope_type": "default",
        "rope_parameters.factor": 1.0,
        "rope_parameters.partial_rotary_factor": 1.0,
    },
    "granite": {**dict.fromkeys(GRANITE, 1.0), "attention_multiplier": 0.25},
    "granite-biases": {"attention_bias": False},
    "smollm3": {**SHARED, "no_rope_layers": [1] * 5},
    "smollm3-window": {"use_sliding_window": False},
    "phi3-window": {**SHARED, "sliding_window": None, "rope_parameters.partial_rotary_factor": 1.0},
    "phi3-longrope": {
        "rope_parameters.short_factor": [1.0] * 6,
        "rope_parameters.rope_type": "default",
    },
    "gemma2": {
        **SHARED,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 16,
        "layer_types": ["full_attention"] * 5,
    },
    "exaone4": {**SHARED, "layer_types": ["sliding_attention"] * 5, "sliding_window": None},
    "exaone4-full": {"rope_parameters.rope_type": "default"},
    "glm4": {**SHARED, "attention_bias": False, "rope_parameters.partial_rotary_factor": 1.0},
    "arcee-yarn": {
        "rope_parameters.rope_type": "default",
        "rope_parameters.factor": 1.0,
        "rope_parameters.beta_fast": 32.0,
        "rope_parameters.beta_slow": 0.25,
        "rope_parameters.truncate": False,
        "rope_parameters.attention_factor": 1.0,
        "rope_parameters.original_max_position_embeddings": 256,
    },
    "ministral3": {**SHARED, "rope_parameters.llama_4_scaling_beta": 0.0, "rope_parameters.mscale_all_dim": 1.0},
    "olmo2": LLAMA,
    "olmo3": {"layer_types": ["full_attention"] * 5},
    "olmo3-yarn": {"rope_parameters.full_attention.rope_type": "default"},
    "falcon3": {"rope_parameters.rope_theta": 10000.0},
    "seed_oss": {**LLAMA, "attention_bias": False, "head_dim": 16},
    "seed_oss-out-bias": {"attention_out_bias": False},
    "ernie4_5": {**LLAMA, "head_dim": 16, "tie_word_embeddings": False},
    "ernie4_5-biases": {"use_bias": False},
    "internlm3": {**LLAMA, "head_dim": 16},
    "internlm3-biases": {"attention_bias": False, "mlp_bias": False},
    "arcee": LLAMA,
}
# The same of GGUF metadata, without the architecture.
GGUF_NEUTRAL: dict[str, dict[str, Any]] = {
    "granite": {"embedding_scale": 1.0, "attention.scale": 0.25, "residual_scale": 1.0, "logit_scale": 1.0},
    "smollm3": GGUF_LLAMA,
    "falcon3": {"rope.freq_base": 100.0},
    "phi3-window": {**GGUF_LLAMA, "attention.sliding_window": 0, "rope.dimension_count": 16},
    "phi3-longrope": {"rope.scaling.attn_factor": 1.5},
    "gemma2": {
        **GGUF_LLAMA,
        "attn_logit_softcapping": 0.0,
        "final_logit_softcapping": 0.0,
        "attention.sliding_window": 0,
        "attention.sliding_window_pattern": 3,
    },
    "exaone4": {**GGUF_LLAMA, "attention.sliding_window": 0, "attention.sliding_window_pattern": 3},
    "glm4": {**GGUF_LLAMA, "rope.dimension_count": 32},
    "arcee-yarn": {
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 0.25,
        "rope.scaling.original_context_length": 256,
        "rope.scaling.attn_factor": 1.5,
        "rope.scaling.yarn_log_multiplier": 1.0,
    },
    "ministral3": {**GGUF_LLAMA, "attention.temperature_scale": 0.0, "rope.scaling.yarn_log_multiplier": 1.0},
    "olmo2": GGUF_LLAMA,
    "olmo3": {"attention.sliding_window": 0, "attention.sliding_window_pattern": 3},
    "olmo3-yarn": {"rope.scaling.type": "none", "rope.scaling.attn_factor": 1.5},
    "seed_oss": {**GGUF_LLAMA, "attention.key_length": 16, "attention.value_length": 16},
    "ernie4_5": {**GGUF_LLAMA, "rope.dimension_count": 16},
    "internlm3": {**GGUF_LLAMA, "rope.dimension_count": 16},
    "arcee": GGUF_LLAMA,
}


def changed(settings: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The settings with one of them changed; dots lead into nested ones."""
    first, _, rest = key.partition(".")
    return {**settings, first: changed(settings[first], rest, value) if rest else value}


def with_setting(source: MemorySource, key: str, value: Any) -> MemorySource:
    """The source with one setting changed."""
    return MemorySource(source.format, source.tensors, changed(source.config, key, value))


def gap_or_error(source: MemorySource, expected: list[torch.Tensor]) -> float:
    """The gap of a source's logits; infinite if its tensors do not fit its numbers, which is an error."""
    try:
        return gap(load_model(source, DOUBLE), expected)
    except WeightError:
        return math.inf


def in_memory(theirs: Any, path: Path, architecture: str = "") -> MemorySource:
    """A GGUF file of the model, read into memory. architecture: as in `write_gguf`."""
    file = GGUFFile(write_gguf(theirs, path, architecture=architecture))
    return MemorySource("gguf", {name: read_tensor(file, name) for name in file.names()}, dict(file.metadata))


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_number_is_seen(name: str, tmp_path: Path) -> None:
    """Negative control: with the number of a model without it, logits differ, whichever kind of file has it."""
    theirs, expected = models(name)
    source = hf_source(theirs)
    gaps = {key: gap_or_error(with_setting(source, key, value), expected) for key, value in NEUTRAL[name].items()}
    if name in GGUF_NEUTRAL:
        file = in_memory(theirs, tmp_path / "model.gguf")
        prefix = file.config["general.architecture"]
        for key, value in GGUF_NEUTRAL[name].items():
            made = MemorySource("gguf", file.tensors, {**file.config, f"{prefix}.{key}": value})
            gaps[key] = gap_or_error(made, expected)
    assert {key: found for key, found in gaps.items() if not found > SEEN} == {}


def test_every_number_of_yarn_equals_transformers() -> None:
    numbers = {**YARN, "beta_slow": 0.5, "truncate": False, "attention_factor": 1.25}
    with in_float64():
        theirs = oracle("arcee-yarn", DOUBLE, rope_parameters=numbers)
        expected = oracle_logits(theirs, PROMPTS)
    source = hf_source(theirs)
    assert gap(load_model(source, DOUBLE), expected) <= EXACT
    for key, value in (("beta_slow", 1.0), ("truncate", True), ("attention_factor", 1.0)):
        assert gap(load_model(with_setting(source, f"rope_parameters.{key}", value), DOUBLE), expected) > SEEN, key


def test_longrope_is_chosen_by_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the original context the long divisors are in use, up to it the short ones; each fails for the other's texts."""
    settings = CONFIGS["phi3-longrope"]().to_dict() | {"original_max_position_embeddings": 24}
    settings["rope_parameters"] |= {"original_max_position_embeddings": 24}
    monkeypatch.setitem(CONFIGS, "phi3-long", lambda: transformers.Phi3Config(**settings))
    long_texts, short_texts = prompts(8, (30, 40)), prompts(8, (5, 24))
    with in_float64():
        theirs = oracle("phi3-long", DOUBLE)
        expected = oracle_logits(theirs, long_texts), oracle_logits(theirs, short_texts)
    source = hf_source(theirs)
    config = read_config(source)
    assert config.layers[0].rope is not None
    assert config.layers[0].rope.amplitude == pytest.approx((1 + math.log(256 / 24) / math.log(24)) ** 0.5)
    for context, right in ((None, 0), (25, 0), (24, 1)):
        model = load_model(source, DOUBLE, config=config.within(context))
        gaps = [
            largest_gap(feed(model, texts, "whole", DOUBLE), expected[i]) for i, texts in enumerate((long_texts, short_texts))
        ]
        assert gaps[right] <= EXACT < SEEN < gaps[1 - right]


@pytest.mark.skipif(not core.available(), reason=core.reason())
def test_the_native_program_takes_the_divisors_of_its_context() -> None:
    source = hf_source(oracle("phi3-longrope"))
    source.config |= {"original_max_position_embeddings": 24}
    source.config["rope_parameters"] = source.config["rope_parameters"] | {"original_max_position_embeddings": 24}
    config = read_config(source)
    for context, divisors in ((24, "short_factor"), (25, "long_factor")):
        settings = TargetSettings(
            quantize="", activations="group", kv_dtype="float32", threads=1, num_blocks=8, max_positions=context + MAX_NODES
        )
        rope = load_target(config, source, settings).config.layers[0].rope
        assert rope is not None
        assert rope.divisors == tuple(source.config["rope_parameters"][divisors])


# One variant of each family.
LAYOUTS = [name for name in NAMES if "-" not in name]
LAYOUTS += ["llama-gqa", "mistral-no-window", "phi3-window", "qwen2-mqa", "qwen3", "gemma3-ropes"]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", [*LAYOUTS, *TWINS])
def test_other_orders_of_rotary_rows_are_seen(name: str, container: str, tmp_path: Path) -> None:
    """Negative control: q and k with halves for pairs, or pairs for halves, fit every shape and give other logits."""
    source, expected = source_and_logits(name, container, tmp_path)
    layer = read_config(source).layers[0]
    for pairs in (True, False):
        tensors = reordered(source.tensors, layer, pairs)
        assert gap(load_model(MemorySource(container, tensors, source.config), DOUBLE), expected) > SEEN


def test_the_orders_of_rotary_rows_are_tested_for_every_family() -> None:
    architectures = {CONFIGS[name]().model_type for name in LAYOUTS}
    assert architectures | {*TWINS, *ROTARY_ENCODERS} == set(ROTARY_FAMILIES)


def as_minicpm(source: MemorySource) -> MemorySource:
    """The same model of Granite's numbers as MiniCPM's folders have them: a depth scale, and a base width."""
    numbers = {"scale_emb": 12.0, "scale_depth": GRANITE["residual_multiplier"] * 3**0.5, "dim_model_base": 128}
    kept = {key: value for key, value in source.config.items() if key not in GRANITE}
    return MemorySource("safetensors", source.tensors, {**kept, "model_type": "minicpm", **numbers})


def as_internlm2(source: MemorySource) -> MemorySource:
    """The same llama as folders of InternLM 2 store it: q, k and v of each K/V head together."""
    parts = {"embed_tokens": "tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm"}
    parts |= {"post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo"}
    parts |= {"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"}
    tensors = {}
    for name, rows in source.tensors.items():
        if "q_proj" in name:
            q, k, v = (source.tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj"))
            joined = torch.cat([q.view(2, 2, 16, 64), k.view(2, 1, 16, 64), v.view(2, 1, 16, 64)], 1)
            tensors[name.replace("self_attn.q_proj", "attention.wqkv")] = joined.reshape(-1, 64)
        elif "k_proj" not in name and "v_proj" not in name:
            own = next((new for old, new in parts.items() if old in name), "")
            tensors[name.replace(next((old for old in parts if old in name), "-"), own)] = rows
    return MemorySource("safetensors", tensors, {**source.config, "model_type": "internlm2", "bias": False})


def source_and_logits(name: str, container: str, folder: Path) -> tuple[MemorySource, list[torch.Tensor]]:
    """A file of a variant or of one of TWINS in memory, and the logits of transformers."""
    variant, changes = TWINS.get(name, (name, {}))
    theirs, expected = models(variant, **changes)
    if container == "gguf":
        return in_memory(theirs, folder / "model.gguf", name if name in TWINS else ""), expected
    made = {"minicpm": as_minicpm, "internlm2": as_internlm2}.get(name, lambda source: source)
    return made(hf_source(theirs)), expected


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", TWINS)
def test_families_without_an_oracle_of_their_own(name: str, container: str, tmp_path: Path) -> None:
    """transformers has no such models: the oracle is one of the same arithmetic under other names and numbers."""
    made, expected = source_and_logits(name, container, tmp_path)
    model = load_model(made, DOUBLE)
    assert model.config.architecture == name
    assert gap(model, expected) <= EXACT
    for tensor, values in stored_tensors(model, container).items():
        torch.testing.assert_close(values, read_tensor(made, tensor, DOUBLE), rtol=0, atol=1e-15)
    if name == "minicpm":
        values = {"scale_depth": 1.0, "scale_emb": 1.0, "dim_model_base": 64}
        stored = {"residual_scale": 1.0, "embedding_scale": 1.0, "logit_scale": 1.0}
    else:
        values = {"rope_parameters.rope_theta": 100.0, "rms_norm_eps": 0.05, "bias": True}
        stored = GGUF_LLAMA
    for key, value in (values if container == "safetensors" else stored).items():
        own = container == "safetensors"
        settings = changed(made.config, key, value) if own else {**made.config, f"{name}.{key}": value}
        assert gap_or_error(MemorySource(container, made.tensors, settings), expected) > SEEN, key


@pytest.mark.skipif(not core.available(), reason=core.reason())
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_planner_reads_config_json_alone(name: str, tmp_path: Path) -> None:
    """`headrace fit` knows the matrices of every family from its config.json."""
    config = CONFIGS[name]()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    shape = open_shape(str(tmp_path))
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert (shape.refusal, shape.architecture) == ("", config.model_type)
    assert shape.parameters == sum(each.numel() for each in model.parameters() if each.dim() == 2)
