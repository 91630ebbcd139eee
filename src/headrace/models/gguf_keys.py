"""GGUF metadata from a model's config: the inverse of models.gguf, for decoders in folders."""

from dataclasses import replace
from typing import Any

import numpy as np

from headrace.data.config import ModelConfig
from headrace.models.gguf import ROPE_DIVISORS
from headrace.models.layers.rotary import frequencies
from headrace.weights.source import WeightError

KNOWN = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


def stored_config(config: ModelConfig) -> ModelConfig:
    """The config that the GGUF file will have. Raises WeightError if GGUF cannot store the model."""
    if config.architecture not in KNOWN:
        raise WeightError(
            f"a folder of {config.architecture} is not written as GGUF; begin with its .gguf file, "
            f"or with a folder of {', '.join(KNOWN)}"
        )
    if any(layer.window for layer in config.layers):
        raise WeightError("sliding windows are not written as GGUF; begin with the model's own .gguf file")
    return with_gguf_architecture(config)


def with_gguf_architecture(config: ModelConfig) -> ModelConfig:
    """The config with GGUF's name of the architecture; Mistral is llama."""
    return replace(config, architecture="llama") if config.architecture == "mistral" else config


def metadata(config: ModelConfig) -> dict[str, Any]:
    """Metadata keys of a config from `stored_config`."""
    layer, name = config.each_layer, config.architecture
    eps = "layer_norm_epsilon" if name == "gpt2" else "layer_norm_rms_epsilon"
    keys: dict[str, Any] = {
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        f"attention.{eps}": config.norm_eps,
        "vocab_size": config.vocab_size,
    }
    if layer.rope is not None:
        keys |= {"rope.dimension_count": layer.rope.dim or layer.head_dim, "rope.freq_base": layer.rope.theta}
        if layer.rope.scaling == "linear":
            keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": layer.rope.factor}
    return {"general.architecture": name} | shape_keys(name, config) | {f"{name}.{key}": value for key, value in keys.items()}


def shape_keys(prefix: str, config: ModelConfig) -> dict[str, int]:
    """Metadata keys of the layers and their sizes, which are those of the first layer."""
    layer = config.layers[0]
    keys = {
        "block_count": config.num_layers,
        "feed_forward_length": layer.ffn,
        "attention.head_count": layer.heads,
        "attention.head_count_kv": layer.kv_heads,
        "attention.key_length": layer.head_dim,
        "attention.value_length": layer.head_dim,
    }
    return {f"{prefix}.{key}": value for key, value in keys.items()}


def made_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """Tensors of a GGUF file that are not parameters: Llama 3's frequency divisors, float32."""
    rope = config.each_layer.rope
    if rope is None or rope.scaling not in ("llama3", "divisors"):
        return {}
    dim = rope.dim or config.each_layer.head_dim
    plain = frequencies(replace(rope, scaling="none"), dim)
    return {ROPE_DIVISORS: (plain / frequencies(rope, dim)).astype(np.float32)}
