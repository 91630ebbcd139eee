"""T5, T5 v1.1 and Flan-T5."""

from dataclasses import replace
from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models import hf
from headrace.models.family import Family, FileFormat
from headrace.models.reader import MAX_LAYERS, Reader
from headrace.weights.origins import NameMap, origins

MLPS = {"relu": ("relu", False), "gated-gelu": ("gelu_tanh", True), "gated-silu": ("silu", True)}  # kind, gated


def _half(ours: str, theirs: str, mlp: int) -> dict[str, str]:
    """Names of what encoder and decoder have in common; the MLP is branch `mlp` of a block."""
    names = {
        "attn_norm": "layer.0.layer_norm",
        "qkv.q": "layer.0.SelfAttention.q",
        "qkv.k": "layer.0.SelfAttention.k",
        "qkv.v": "layer.0.SelfAttention.v",
        "out": "layer.0.SelfAttention.o",
        "mlp_norm": f"layer.{mlp}.layer_norm",
        "up": f"layer.{mlp}.DenseReluDense.wi",
        "up.gate": f"layer.{mlp}.DenseReluDense.wi_0",
        "up.up": f"layer.{mlp}.DenseReluDense.wi_1",
        "down": f"layer.{mlp}.DenseReluDense.wo",
    }
    names_by_target = {f"{ours}layers.{{i}}.{part}": f"{theirs}.block.{{i}}.{name}" for part, name in names.items()}
    names_by_target[f"{ours}relative"] = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias"
    names_by_target[f"{ours}norm"] = f"{theirs}.final_layer_norm"
    return names_by_target


CROSS = {
    "layers.{i}.cross_norm": "decoder.block.{i}.layer.1.layer_norm",
    "layers.{i}.cross_q": "decoder.block.{i}.layer.1.EncDecAttention.q",
    "layers.{i}.cross_kv.k": "decoder.block.{i}.layer.1.EncDecAttention.k",
    "layers.{i}.cross_kv.v": "decoder.block.{i}.layer.1.EncDecAttention.v",
    "layers.{i}.cross_out": "decoder.block.{i}.layer.1.EncDecAttention.o",
}
NAMES = {"tokens": "shared", "output": "lm_head", **_half("encoder.", "encoder", 1), **_half("", "decoder", 2), **CROSS}
NOT_USED = (
    r"(encoder|decoder)\.embed_tokens\.weight",  # the shared table again
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",  # of the first files, never read
)


def from_hf(read: Reader) -> ModelConfig:
    mlp = read.get("feed_forward_proj", "relu")
    if mlp not in MLPS:
        raise read.error(f"has the MLP {mlp!r}; t5 is built with {', '.join(MLPS)}")
    activation, gated = MLPS[mlp]
    heads, hidden, vocab_size = read.size("num_heads"), read.size("d_model"), read.size("vocab_size")
    layer = LayerConfig(heads, heads, read.size("d_kv", hidden // heads or 1), read.size("d_ff"))
    count = read.size("num_layers", most=MAX_LAYERS)
    buckets, distance = read.size("relative_attention_num_buckets", 32), read.size("relative_attention_max_distance", 128)
    if buckets % 4 or distance <= buckets // 2:
        raise read.error(f"has {buckets} buckets up to distance {distance}; a multiple of 4 is needed, and a larger distance")
    scaled = bool(read.get("scale_decoder_outputs", read.get("tie_word_embeddings", True)))
    encoder = ModelConfig(
        architecture="t5",
        vocab_size=vocab_size,
        hidden_size=hidden,
        layers=(layer,) * count,
        max_position=read.size("n_positions", 512),
        norm_eps=read.number("layer_norm_epsilon", 1e-6),
        tied_head="lm_head.weight" not in read.source.names(),
        attn_scale=1.0,
        encoder=True,
        activation=activation,
        gated=gated,
        buckets=buckets,
        bucket_distance=distance,
    )
    return replace(
        encoder,
        layers=(layer,) * read.size("num_decoder_layers", count, most=MAX_LAYERS),
        encoder=False,
        source=encoder,
        head_scale=hidden**-0.5 if scaled else 1.0,
        start=hf.token(read, "decoder_start_token_id", vocab_size, hf.token(read, "pad_token_id", vocab_size, 0)),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json that `from_hf` reads as these numbers."""
    assert config.source is not None
    layer = config.each_layer
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": config.hidden_size,
        "d_kv": layer.head_dim,
        "d_ff": layer.ffn,
        "num_heads": layer.heads,
        "num_layers": config.source.num_layers,
        "num_decoder_layers": config.num_layers,
        "n_positions": config.max_position,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": next(name for name, mlp in MLPS.items() if mlp == (config.activation, config.gated)),
        "relative_attention_num_buckets": config.buckets,
        "relative_attention_max_distance": config.bucket_distance,
        "tie_word_embeddings": config.tied_head,
        "scale_decoder_outputs": config.head_scale != 1.0,
        "decoder_start_token_id": config.start,
        "pad_token_id": config.start,
    }


FAMILY = Family(
    architecture="t5",
    shape="t5",
    hf=FileFormat(from_hf, NameMap(origins(NAMES), "", NOT_USED)),
    gguf="T5 is read from safetensors; take the folder the model is published as",
)
