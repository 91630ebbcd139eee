"""Marian, as the opus-mt models are published: translation between two languages."""

from dataclasses import replace

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models import hf
from headrace.models.family import Family, FileFormat
from headrace.models.reader import MAX_LAYERS, Reader
from headrace.weights.origins import NameMap, Origin, origins

ACTIVATIONS = {"swish": "silu", "silu": "silu", "gelu": "gelu", "relu": "relu"}
# Settings of older files, and the value that the family is built with.
BUILT = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
    "share_encoder_decoder_embeddings": True,
}
COMMON = {
    "qkv.q": "self_attn.q_proj",
    "qkv.k": "self_attn.k_proj",
    "qkv.v": "self_attn.v_proj",
    "out": "self_attn.out_proj",
    "attn_norm": "self_attn_layer_norm",
    "up": "fc1",
    "down": "fc2",
    "mlp_norm": "final_layer_norm",
}
CROSS = {
    "cross_q": "encoder_attn.q_proj",
    "cross_kv.k": "encoder_attn.k_proj",
    "cross_kv.v": "encoder_attn.v_proj",
    "cross_out": "encoder_attn.out_proj",
    "cross_norm": "encoder_attn_layer_norm",
}
NAMES = {
    "tokens.weight": "shared.weight",
    **{f"encoder.layers.{{i}}.{ours}": f"encoder.layers.{{i}}.{theirs}" for ours, theirs in COMMON.items()},
    **{f"layers.{{i}}.{ours}": f"decoder.layers.{{i}}.{theirs}" for ours, theirs in (COMMON | CROSS).items()},
}
SAVED_TWICE = (r"(encoder|decoder)\.embed_(tokens|positions)\.weight",)  # the shared table, and what is computed


def from_hf(read: Reader) -> ModelConfig:
    for key, built in BUILT.items():
        if bool(read.get(key, built)) is not built:
            raise read.error(f"has {key} {not built}; marian is built with {built}")
    vocab_size = read.size("vocab_size")
    if read.size("decoder_vocab_size", vocab_size) != vocab_size:
        raise read.error("has two vocabularies; marian is built with one for both languages")
    activation = read.get("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise read.error(f"has the activation {activation!r}; marian is built with {', '.join(ACTIVATIONS)}")
    pad = hf.token(read, "pad_token_id", vocab_size)
    encoder = ModelConfig(
        architecture="marian",
        vocab_size=vocab_size,
        hidden_size=read.size("d_model"),
        layers=_layers(read, "encoder"),
        max_position=read.size("max_position_embeddings"),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        embed_scale=read.size("d_model") ** 0.5 if read.get("scale_embedding") else 1.0,
        encoder=True,
        activation=ACTIVATIONS[activation],
    )
    start = hf.token(read, "decoder_start_token_id", vocab_size, pad)
    return replace(encoder, layers=_layers(read, "decoder"), encoder=False, source=encoder, start=start, never=pad)


def _layers(read: Reader, half: str) -> tuple[LayerConfig, ...]:
    width, heads = read.size("d_model"), read.size(f"{half}_attention_heads")
    if width % heads or width % 2:
        raise read.error(f"has d_model {width}, which must be even and a multiple of its {heads} heads")
    return (LayerConfig(heads, heads, width // heads, read.size(f"{half}_ffn_dim")),) * read.size(
        f"{half}_layers", most=MAX_LAYERS
    )


FAMILY = Family(
    architecture="marian",
    shape="marian",
    hf=FileFormat(from_hf, NameMap(origins(NAMES) | {"output.bias": Origin("final_logits_bias")}, "model.", SAVED_TWICE)),
    gguf="Marian is read from safetensors; take or convert the folder the model is published as",
)
