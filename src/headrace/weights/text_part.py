"""Folders of models that also read images: settings and tensor names of the text model in them. Images are not read."""

import re
from collections.abc import Mapping
from typing import Any

# Text models by model_type of the folder; the first one if the text model does not name its own.
TEXT_MODELS = {"gemma3": ("gemma3_text",), "mistral3": ("mistral", "ministral3")}
# Keys of the whole folder that its text model has too.
SHARED = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "eos_token_id")
# Keys that published folders leave out, with the values of transformers.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    }
}
IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
PREFIXES = {"model.language_model.": "model.", "language_model.": ""}


def text_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """config.json of the text model in a folder that also reads images; None for any other config."""
    text, known = config.get("text_config"), TEXT_MODELS.get(str(config.get("model_type", "")))
    if not isinstance(text, Mapping) or known is None:
        return None
    kind = text.get("model_type") or known[0]
    if kind not in known:
        return None
    shared = {key: config[key] for key in SHARED if config.get(key) is not None}
    return {**DEFAULTS.get(kind, {}), **shared, **text, "model_type": kind}


def text_name(name: str) -> str | None:
    """Name of a tensor in a folder of the text model alone; None for a tensor of the images' model."""
    if IMAGES.fullmatch(name):
        return None
    prefix = next((each for each in PREFIXES if name.startswith(each)), "")
    return PREFIXES.get(prefix, "") + name.removeprefix(prefix)
