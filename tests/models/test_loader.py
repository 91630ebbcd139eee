"""The loader: every parameter filled exactly once, nothing left over, one clear line for whatever is wrong with a file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from headrace.models.families import FAMILIES
from headrace.models.registry import describe, read_config
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from headrace.weights.parts import WeightPart, plan, unpaired
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.source import WeightError
from tests.models.feeding import feed
from tests.models.gguf_writer import write_gguf
from tests.models.zoo import CONFIGS, MemorySource, hf_source, largest_gap, oracle, oracle_logits, prompts

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def source() -> MemorySource:
    return hf_source(oracle("llama-gqa"))


def refusal(source: MemorySource, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(WeightError) as caught:
        load_model(source, dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_tensor_is_named(source: MemorySource) -> None:
    del source.tensors[Q]
    assert refusal(source) == f"memory: tensor '{Q}' is missing; the file is incomplete"
    del source.tensors["lm_head.weight"]
    assert "(and 1 more)" in refusal(source)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_saved_without_its_head(tied: bool, tmp_path: Path) -> None:
    whole = oracle("llama-gqa")
    transformers.LlamaModel(
        transformers.LlamaConfig(**{**whole.config.to_dict(), "tie_word_embeddings": tied})
    ).save_pretrained(tmp_path)
    folder = SafetensorsFolder(tmp_path)
    assert "lm_head.weight" not in folder.names()
    if tied:
        assert load_model(folder).config.tied_head
        return
    with pytest.raises(WeightError, match=r"saved without its head \(no 'lm_head.weight'\); save it with AutoModelForCausalLM"):
        load_model(folder)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))  # the other way it names
    assert load_model(SafetensorsFolder(tmp_path)).config.tied_head


def test_a_surplus_tensor_is_named(source: MemorySource) -> None:
    source.tensors["model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.ones(1)
    assert "'model.layers.0.self_attn.q_proj.lora_A.weight' has no place in a llama model" in refusal(source)


def test_a_parameter_filled_twice_is_refused(source: MemorySource) -> None:
    source.tensors[Q.removeprefix("model.")] = source.tensors[Q]
    assert f"tensors '{Q}' and '{Q.removeprefix('model.')}' are both" in refusal(source)


def test_a_layer_beyond_the_last_is_surplus(source: MemorySource) -> None:
    source.tensors["model.layers.3.input_layernorm.weight"] = torch.ones(64)
    assert "'model.layers.3.input_layernorm.weight' has no place" in refusal(source)


def test_a_wrong_shape_is_named_with_both_sizes(source: MemorySource) -> None:
    source.tensors[Q] = torch.ones(64, 60)
    assert f"tensor '{Q}' is 64 x 60 and must be 64 x 64" in refusal(source)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused(source: MemorySource, value: float) -> None:
    source.tensors[Q][3, 5] = value
    assert f"tensor '{Q}' has 1 values that are NaN or infinite in float32" in refusal(source)


def test_values_that_float16_cannot_hold_are_refused(source: MemorySource) -> None:
    source.tensors[Q][3, 5] = 1e5
    assert "needs a wider dtype" in refusal(source, torch.float16)
    load_model(source, torch.bfloat16)


def test_an_overflow_of_only_the_sum_is_no_error(source: MemorySource) -> None:
    """The check sums in float32; large finite values that overflow only the sum must load."""
    source.tensors[Q][:] = 3e38
    load_model(source)


def test_an_unknown_architecture_is_refused_with_the_supported_names(source: MemorySource) -> None:
    source.config["model_type"] = "nameless"
    message = refusal(source)
    assert f"unknown architecture 'nameless'; known are {', '.join(sorted(FAMILIES))}" in message


@pytest.mark.parametrize("name", CONFIGS)
def test_every_value_of_every_parameter_is_filled(name: str) -> None:
    """All stored values are 1, so all parameters are (gemma's norms become 1 + 1); memory that was not filled would show."""
    source = hf_source(oracle(name))
    source.tensors = {key: torch.ones_like(value) for key, value in source.tensors.items()}
    norm = 2.0 if name.startswith("gemma") else 1.0
    for key, value in load_model(source, torch.float64).named_parameters():
        is_norm = value.dim() == 1 and key.endswith("norm.weight")
        assert bool((value == (norm if is_norm else 1.0)).all()), key


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-tied", "gemma3-one-kv-head", "gpt2", "llama-rope-llama3"])
def test_the_plan_maps_stored_rows_to_parameters(name: str, tmp_path: Path) -> None:
    """Following the plan over the raw rows, as a packer of quantised rows does, gives the loaded parameters."""
    source = GGUFFile(write_gguf(oracle(name), tmp_path / "model.gguf"))
    model = load_model(source)
    plans = plan(describe(read_config(source)), source)  # on a description: nothing is allocated
    parameters = dict(model.named_parameters())
    assert plans.keys() == parameters.keys()
    for key, parts in plans.items():
        rows = [follow(part, source) for part in parts]
        np.testing.assert_array_equal(np.concatenate(rows), parameters[key].numpy(), err_msg=key)


def follow(part: WeightPart, source: GGUFFile) -> np.ndarray:
    assert not part.transpose  # GGUF never needs it
    shape = source.info(part.source).shape
    stored = source.raw(part.source)
    if len(shape) == 1:  # one row of numbers: a vector's entries are the rows of the parameter
        stored = stored.reshape(-1, 4)
    if part.rows is not None:
        stored = stored[slice(*part.rows)]
    if part.row_order is not None:
        stored = stored[list(part.row_order)]
    return np.ascontiguousarray(stored).view(np.float32).reshape(part.shape) + np.float32(part.shift)


def test_rotary_neighbours_become_halves() -> None:
    assert unpaired(2, 6, 6) == (0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11)
    assert unpaired(1, 6, 4) == (0, 2, 1, 3, 4, 5)  # what does not turn stays where it is


def test_tensors_nothing_needs_are_ignored_by_name() -> None:
    tied = hf_source(oracle("llama-mha-tied"))
    tied.tensors["lm_head.weight"] = tied.tensors["model.embed_tokens.weight"]
    tied.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    load_model(tied)
    gpt2 = hf_source(oracle("gpt2"))
    gpt2.tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 256, 256)
    gpt2.tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    load_model(gpt2)


def test_a_base_model_saved_without_its_prefix_loads() -> None:
    theirs = oracle("gpt2")
    source = hf_source(theirs)
    source.tensors = {key.removeprefix("transformer."): value for key, value in source.tensors.items()}
    batch = prompts()
    assert largest_gap(feed(load_model(source), batch, "whole"), oracle_logits(theirs, batch)) <= 1e-4


@pytest.mark.parametrize("name", ["qwen2-tied", "gemma3-ropes"])
def test_a_hugging_face_folder_loads(name: str, tmp_path: Path) -> None:
    theirs = oracle(name)
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    batch = prompts()
    model = load_model(SafetensorsFolder(tmp_path))
    assert largest_gap(feed(model, batch, "whole"), oracle_logits(theirs, batch)) <= 1e-4


def test_a_tied_head_is_one_tensor_and_norms_stay_wide() -> None:
    model = load_model(hf_source(oracle("llama-mha-tied")), torch.bfloat16)
    assert model.output is model.tokens  # type: ignore[attr-defined]
    assert model.tokens.weight.dtype == torch.bfloat16  # type: ignore[attr-defined]
    assert model.norm.weight.dtype == torch.float32


def test_progress_ends_at_all_bytes() -> None:
    calls: list[tuple[int, int]] = []
    load_model(hf_source(oracle("gpt2")), progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1]
