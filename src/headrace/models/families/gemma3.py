"""Gemma 3 (text), EmbeddingGemma: five sliding layers to each full one, rotary bases by kind, embeddings times √width."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.data.config import ModelConfig, RopeConfig
from headrace.models import gguf, hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader, windowed
from headrace.weights.origins import NameMap, laid_out, origins

PATTERN = 6  # every sixth layer is full, where the file does not say
GGUF_27B_LAYERS = 62  # the one size whose queries are scaled by hidden / heads, which GGUF files do not say either

POST_NORMS = {
    "layers.{i}.attn_post_norm": "layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp_norm": "layers.{i}.pre_feedforward_layernorm",
    "layers.{i}.mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
}
GGUF_POST_NORMS = {
    "layers.{i}.attn_post_norm": "blk.{i}.post_attention_norm",
    "layers.{i}.mlp_post_norm": "blk.{i}.post_ffw_norm",
}


HF = NameMap(laid_out(llama.HF_NAMES | origins(POST_NORMS), "minus_one", "norm.weight"), "model.", llama.INV_FREQ)
# EmbeddingGemma's last two matrices, which `weights.sentence` reads.
DENSE = (r"dense_[23]\.weight",)
GGUF = NameMap(llama.GGUF_NAMES | origins(GGUF_POST_NORMS), ignored=llama.DIVISORS + DENSE)
BOTH = "use_bidirectional_attention"


def scaled(config: ModelConfig, attn_scale: float) -> ModelConfig:
    """The config with the scales and the activation of all Gemma models."""
    return replace(config, attn_scale=attn_scale, embed_scale=config.hidden_size**0.5, activation="gelu_tanh")


def _normed(config: ModelConfig) -> ModelConfig:
    return replace(config, qk_norm=True)


def _rotary(read: Reader) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The rotary settings of full layers and of sliding ones."""
    new = read.get("rope_parameters")
    if new is None:
        return hf.rope_settings(read), {"rope_theta": read.get("rope_local_base_freq")}
    return new.get("full_attention") or {}, new.get("sliding_attention") or {}


def from_hf(read: Reader) -> ModelConfig:
    full, sliding = _rotary(read)
    config = hf.decoder(read, "gelu_pytorch_tanh", tied=True, rotary=full, theta=1000000.0)
    local = hf.rope(read, sliding, config.each_layer.head_dim, 10000.0)
    windows = hf.windows(read, lambda layer: (layer + 1) % read.size("sliding_window_pattern", PATTERN) != 0)
    config = _normed(scaled(windowed(config, windows, local), read.number("query_pre_attn_scalar") ** -0.5))
    return both_ways(config) if read.get(BOTH) else config


def both_ways(config: ModelConfig) -> ModelConfig:
    """The config of the encoder: rows see both sides, and half of a window on each."""
    layers = (replace(layer, window=layer.window and layer.window // 2 + 1) for layer in config.layers)
    return replace(config, layers=tuple(layers), encoder=True)


def from_gguf(read: Reader) -> ModelConfig:
    config = gguf.decoder(read)
    layer = config.each_layer
    local = RopeConfig(theta=read.number("rope.freq_base_swa", 10000.0))
    windowed_config = windowed(config, gguf.windows(read, config, PATTERN), local)
    width = config.hidden_size // layer.heads if config.num_layers == GGUF_27B_LAYERS else layer.head_dim
    return _normed(scaled(windowed_config, float(width) ** -0.5))


FAMILY = Family(
    architecture="gemma3_text",
    shape="gemma3",
    hf=FileFormat(from_hf, HF),
    gguf=FileFormat(from_gguf, GGUF),
    gguf_name="gemma3",
    built=(BOTH,),
)
