"""Folders of models that also read images: their text model equals that of `transformers`, and is all that is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace import core
from headrace.data.settings import ModelSettings
from headrace.startup.fit.headers import open_shape
from headrace.startup.opening import open_files
from headrace.weights.loader import load_model
from headrace.weights.schemes.folder import open_folder
from headrace.weights.source import WeightError
from headrace.weights.text_part import DEFAULTS, text_settings
from tests.models.feeding import feed
from tests.models.zoo import CONFIGS, VOCAB, draw_weights, in_float64, largest_gap, oracle_logits, prompts

DOUBLE, EXACT, SEEN = torch.float64, 1e-10, 1e-3
PROMPTS = prompts(7, (3, 40))
EYE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
# By the text model's variant: the whole model's config, its vision model's, further numbers.
WHOLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3-ropes": ("Gemma3Config", "SiglipVisionConfig", {"mm_tokens_per_image": 4}),
    "mistral-no-window": ("Mistral3Config", "PixtralVisionConfig", {}),
    "ministral3": ("Mistral3Config", "PixtralVisionConfig", {}),
}
# Names in published folders, and in those that newer versions of transformers hold in memory.
NAMES = ("language_model.model.", "model.language_model.")


def whole_model(name: str, *, tied: bool) -> Any:
    """A tiny model of `transformers` that reads images and text, in float64."""
    config, eye, numbers = WHOLE[name]
    text = CONFIGS[name]()
    text.tie_word_embeddings = tied
    text.final_logit_softcapping = None  # which models that read images leave out in `transformers`
    made = getattr(transformers, config)(
        text_config=text, vision_config=getattr(transformers, eye)(**EYE), tie_word_embeddings=tied,
        image_token_index=VOCAB - 1, **numbers,
    )  # fmt: skip
    made._attn_implementation = "eager"
    model = transformers.AutoModelForImageTextToText.from_config(made).to(DOUBLE).eval()
    draw_weights(model, 0.0 if name.startswith("gemma") else 1.0)
    return model


def write(model: Any, folder: Path, prefix: str) -> Path:
    """The model's folder with the names of NAMES."""
    model.float().save_pretrained(folder)
    model.to(DOUBLE)
    if prefix != NAMES[0]:
        tensors = {
            name.replace(NAMES[0], prefix).replace("language_model.lm_head", "lm_head"): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("prefix", NAMES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", WHOLE)
def test_the_text_model_equals_transformers(name: str, tied: bool, prefix: str, tmp_path: Path) -> None:
    with in_float64():
        theirs = whole_model(name, tied=tied)
        expected = oracle_logits(theirs, PROMPTS)
    opened = open_files(write(theirs, tmp_path, prefix))
    assert opened.config.architecture == CONFIGS[name]().model_type
    assert opened.config.tied_head is tied
    assert largest_gap(feed(load_model(opened.source, DOUBLE), PROMPTS, "whole", DOUBLE), expected) <= EXACT
    assert opened.settings_summary(ModelSettings()) == ", text only (images are not read)"


def test_other_tensors_are_seen(tmp_path: Path) -> None:
    """Controls: a tensor with no place is refused, one of the text model left out, and another layer's changes the logits."""
    with in_float64():
        theirs = whole_model("ministral3", tied=False)
        expected = oracle_logits(theirs, PROMPTS)
    file = write(theirs, tmp_path, NAMES[0]) / "model.safetensors"
    tensors = load_file(file)
    one, two = (f"{NAMES[0]}layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    save_file({**tensors, "audio_tower.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    with pytest.raises(WeightError, match=r"audio_tower.weight.* has no place in a ministral3 model"):
        load_model(open_folder(tmp_path), DOUBLE)
    save_file({name: tensor for name, tensor in tensors.items() if name != one}, file, {"format": "pt"})
    with pytest.raises(WeightError, match=r"model.layers.0.mlp.up_proj.weight"):
        load_model(open_folder(tmp_path), DOUBLE)
    save_file({**tensors, one: tensors[two], two: tensors[one]}, file, {"format": "pt"})
    assert largest_gap(feed(load_model(open_folder(tmp_path), DOUBLE), PROMPTS, "whole", DOUBLE), expected) > SEEN


def test_keys_that_published_folders_leave_out_have_the_values_of_transformers() -> None:
    theirs = transformers.Gemma3TextConfig().to_dict()
    assert {"gemma3_text": {key: theirs[key] for key in DEFAULTS["gemma3_text"]}} == DEFAULTS


# Gemma 3 4B's config.json, as published.
GEMMA3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


@pytest.mark.skipif(not core.available(), reason=core.reason())
def test_the_planner_reads_the_text_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_4B))
    shape = open_shape(str(tmp_path))
    assert (shape.refusal, shape.architecture) == ("", "gemma3_text")
    assert round(shape.parameters / 1e9, 1) == 3.9


def test_other_models_of_images_are_refused(tmp_path: Path) -> None:
    """One whose text model is not supported there, and one without a text model."""
    other = {"model_type": "gemma3", "text_config": {"model_type": "mixtral"}}
    assert text_settings(other) is None
    assert text_settings({"model_type": "llava", "text_config": {"model_type": "llama"}}) is None
    save_file({"a": torch.ones(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    for config in (other, {"model_type": "mistral3"}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(WeightError, match="is not supported, Headrace lacks its images; take the text model's GGUF file"):
            open_files(tmp_path)
