"""ModernBERT: an encoder with windows, and rotary bases of their own for layers with and without one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.data.config import ModelConfig, RopeConfig
from headrace.models import gguf, hf
from headrace.models.family import Family, FileFormat
from headrace.models.reader import MAX_LAYERS, Reader, windowed
from headrace.weights.origins import NameMap, origins, stacked

PERIOD = 3  # every third layer sees the whole text, from the first on
GLOBAL, LOCAL = 160000.0, 10000.0
QKV, GATE_UP = ("layers.{i}.qkv", "qkv"), ("layers.{i}.gate_up", ("gate", "up"))
NAMES = origins(
    {
        "tokens.weight": "embeddings.tok_embeddings.weight",
        "embed_norm": "embeddings.norm",
        "layers.{i}.attn_norm": "layers.{i}.attn_norm",
        "layers.{i}.out": "layers.{i}.attn.Wo",
        "layers.{i}.mlp_norm": "layers.{i}.mlp_norm",
        "layers.{i}.down": "layers.{i}.mlp.Wo",
        "norm": "final_norm",
    }
)
GGUF_NAMES = origins(
    {
        "tokens.weight": "token_embd.weight",
        "embed_norm": "token_embd_norm",
        "layers.{i}.attn_norm": "blk.{i}.attn_norm",
        "layers.{i}.out": "blk.{i}.attn_output",
        "layers.{i}.mlp_norm": "blk.{i}.ffn_norm",
        "layers.{i}.down": "blk.{i}.ffn_down",
        "norm": "output_norm",
    }
)
HF = NAMES | stacked(*QKV, "layers.{i}.attn.Wqkv") | stacked(*GATE_UP, "layers.{i}.mlp.Wi")
GGUF = GGUF_NAMES | stacked(*QKV, "blk.{i}.attn_qkv") | stacked(*GATE_UP, "blk.{i}.ffn_up")
# Tensors that embeddings do not need; `weights.ranking` reads the heads of rerankers.
HEADS = (r"head\..*", r"classifier\..*", r"decoder\..*")
GGUF_HEADS = (r"cls(\.output|\.norm)?\.(weight|bias)",)


def from_hf(read: Reader) -> ModelConfig:
    hf.require_activation(read, "gelu")
    if read.get("norm_bias"):
        raise read.error("asks for norm_bias, which is not built; use a checkpoint without it")
    layers = hf.even_layers(read, "hidden_size", "num_attention_heads", "num_hidden_layers", read.size("intermediate_size"))
    hf.check_layer_types(read)
    full, sliding = _rotary(read)
    head_dim = layers[0].head_dim
    rope, local = hf.rope(read, full, head_dim, GLOBAL), hf.rope(read, sliding, head_dim, LOCAL)
    period, types = read.size("global_attn_every_n_layers", PERIOD, most=MAX_LAYERS), read.get("layer_types")
    slides = [i % period != 0 for i in range(len(layers))] if types is None else [t == "sliding_attention" for t in types]
    bias = bool(read.get("attention_bias", False))
    config = ModelConfig(
        architecture=read.architecture,
        vocab_size=read.size("vocab_size"),
        hidden_size=read.size("hidden_size"),
        layers=tuple(replace(layer, rope=rope) for layer in layers),
        max_position=read.size("max_position_embeddings"),
        norm_eps=read.number("norm_eps", 1e-5),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(read.get("mlp_bias", False)),
        activation="gelu",
        encoder=True,
    )
    return windowed(config, _windows(read.size("local_attention", 128, least=2), slides), local)


def from_gguf(read: Reader) -> ModelConfig:
    hf.require_activation(read, "gelu")
    config = gguf.decoder(read, "attention.layer_norm_epsilon")
    pattern = read.get("attention.sliding_window_pattern", PERIOD)
    slides = [i % pattern != 0 for i in range(config.num_layers)] if isinstance(pattern, int) else list(pattern)
    if len(slides) != config.num_layers:
        raise read.error(f"has attention.sliding_window_pattern of {len(slides)} entries for {config.num_layers} layers")
    config = replace(config, activation="gelu", encoder=True)
    local = RopeConfig(read.number("rope.freq_base_swa", LOCAL))
    return windowed(config, _windows(read.size("attention.sliding_window", least=2), slides), local)


def _windows(both: int, slides: list[bool]) -> list[int | None]:
    """Window of each layer. both: tokens that a row sees on both sides together."""
    return [both // 2 + 1 if each else None for each in slides]


def _rotary(read: Reader) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The rotary settings of layers without a window and with one."""
    new = read.get("rope_parameters")
    if new is None:
        return {"rope_theta": read.get("global_rope_theta")}, {"rope_theta": read.get("local_rope_theta")}
    return new.get("full_attention") or {}, new.get("sliding_attention") or {}


FAMILY = Family(
    architecture="modernbert",
    shape="modernbert",
    hf=FileFormat(from_hf, NameMap(HF, "model.", HEADS)),
    gguf=FileFormat(from_gguf, NameMap(GGUF, ignored=GGUF_HEADS)),
    gguf_name="modern-bert",
)
