"""Whisper: speech recognition and translation into English."""

from dataclasses import replace

from headrace.data.config import Audio, LayerConfig, ModelConfig
from headrace.models import hf
from headrace.models.family import Family, FileFormat
from headrace.models.reader import MAX_LAYERS, Reader
from headrace.weights.origins import NameMap, laid_out, origins

COMMON = {
    "attn_norm": "self_attn_layer_norm",
    "qkv.q": "self_attn.q_proj",
    "qkv.k": "self_attn.k_proj",
    "qkv.v": "self_attn.v_proj",
    "out": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}
CROSS = {
    "cross_norm": "encoder_attn_layer_norm",
    "cross_q": "encoder_attn.q_proj",
    "cross_kv.k": "encoder_attn.k_proj",
    "cross_kv.v": "encoder_attn.v_proj",
    "cross_out": "encoder_attn.out_proj",
}
NAMES = {
    "encoder.conv1": "encoder.conv1",
    "encoder.conv2": "encoder.conv2",
    "encoder.positions.weight": "encoder.embed_positions.weight",
    "encoder.norm": "encoder.layer_norm",
    "tokens.weight": "decoder.embed_tokens.weight",
    "positions.weight": "decoder.embed_positions.weight",
    "norm": "decoder.layer_norm",
    **{f"encoder.layers.{{i}}.{ours}": f"encoder.layers.{{i}}.{theirs}" for ours, theirs in COMMON.items()},
    **{f"layers.{{i}}.{ours}": f"decoder.layers.{{i}}.{theirs}" for ours, theirs in (COMMON | CROSS).items()},
}
SAVED_TWICE = (r"proj_out\.weight",)  # the head, tied to the token table
# Rows of log-mel values for one position of the encoder.
ROWS_PER_POSITION = 2
MAX_BINS = 1024


def from_hf(read: Reader) -> ModelConfig:
    hf.require_activation(read, "gelu")
    if read.get("scale_embedding"):
        raise read.error("has scale_embedding true; whisper is built with false")
    vocab_size = read.size("vocab_size")
    audio = Audio(
        bins=read.size("num_mel_bins", most=MAX_BINS),
        rows=ROWS_PER_POSITION * read.size("max_source_positions", most=1 << 16),
    )
    encoder = ModelConfig(
        architecture="whisper",
        vocab_size=vocab_size,
        hidden_size=read.size("d_model"),
        layers=_layers(read, "encoder"),
        max_position=audio.positions,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        encoder=True,
        activation="gelu",
        audio=audio,
    )
    return replace(
        encoder,
        layers=_layers(read, "decoder"),
        max_position=read.size("max_target_positions"),
        encoder=False,
        source=encoder,
        audio=None,
    )


def _layers(read: Reader, half: str) -> tuple[LayerConfig, ...]:
    width, heads = read.size("d_model"), read.size(f"{half}_attention_heads")
    if width % heads:
        raise read.error(f"has d_model {width}, no multiple of its {heads} heads")
    layer = LayerConfig(heads, heads, width // heads, read.size(f"{half}_ffn_dim"))
    return (layer,) * read.size(f"{half}_layers", most=MAX_LAYERS)


FAMILY = Family(
    architecture="whisper",
    shape="whisper",
    hf=FileFormat(
        from_hf,
        NameMap(laid_out(origins(NAMES), "conv", "conv1.weight", "conv2.weight"), "model.", SAVED_TWICE),
    ),
    gguf="Whisper is read from folders (safetensors, CTranslate2) and ggml files of whisper.cpp; take such a one",
)
