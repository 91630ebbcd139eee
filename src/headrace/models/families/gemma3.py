"""Gemma 3 (text): five sliding layers to each full one, rotary bases of their own, embeddings times the root of the width."""

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


def _scaled(config: ModelConfig, attn_scale: float) -> ModelConfig:
    return replace(config, attn_scale=attn_scale, embed_scale=config.hidden_size**0.5)


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
    return _scaled(windowed(config, windows, local), read.number("query_pre_attn_scalar") ** -0.5)


def from_gguf(read: Reader) -> ModelConfig:
    config = gguf.decoder(read)
    layer, count = config.each_layer, config.num_layers
    pattern = read.get("attention.sliding_window_pattern", PATTERN)
    slides = [(i + 1) % pattern != 0 for i in range(count)] if isinstance(pattern, int) else list(pattern)
    if len(slides) != count:
        raise read.error(f"has attention.sliding_window_pattern of {len(slides)} entries for {count} layers")
    local = RopeConfig(theta=read.number("rope.freq_base_swa", 10000.0))
    made = windowed(config, [layer.window if each else None for each in slides], local)
    width = config.hidden_size // layer.heads if count == GGUF_27B_LAYERS else layer.head_dim
    return _scaled(made, float(width) ** -0.5)


FAMILY = Family(
    architecture="gemma3_text",
    shape="gemma3",
    hf=FileFormat(
        from_hf,
        NameMap(laid_out(llama.HF_NAMES | origins(POST_NORMS), "minus_one", "norm.weight"), "model.", llama.INV_FREQ),
    ),
    gguf=FileFormat(from_gguf, NameMap(llama.GGUF_NAMES | origins(GGUF_POST_NORMS), ignored=llama.DIVISORS)),
    gguf_name="gemma3",
)
