"""Config of a model from the config.json of a Hugging Face folder, the parts that families share. Rotary settings have an old
form (rope_theta, rope_scaling) and a new one (rope_parameters)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headrace.data.config import LayerConfig, ModelConfig, RopeConfig
from headrace.models.reader import MAX_HEAD_DIM, MAX_LAYERS, Reader, check_rope, long_amplitude, magnitude

UNQUANTISED = "take the model's own safetensors (bfloat16 or float16; --quantize int4 makes integers of them), or a GGUF file"
# Rotary scalings. "dynamic" changes nothing within the model's own context, which no request exceeds.
SCALINGS = ("default", "linear", "llama3", "yarn", "longrope", "proportional", "dynamic")
# Unsupported settings that change the computation, each with the value that disables it.
OFF: dict[str, object] = {
    "quantization_config": None,
    "use_bidirectional_attention": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "is_decoder": False,
}


def refuse_not_built(read: Reader, built: tuple[str, ...] = ()) -> None:
    """Raise WeightError for a setting that the family does not support. built: keys of `OFF` that it supports."""
    quantised = read.values.get("quantization_config")
    if isinstance(quantised, Mapping):
        scheme = str(quantised.get("quant_method") or "unknown")
        raise read.error(f"has weights quantised by {scheme!r}, which is not supported; {UNQUANTISED}")
    for key, off in OFF.items():
        if key not in built and read.values.get(key) not in (off, None):
            raise read.error(f"asks for {key}, which is not built; use a checkpoint without it")


def require_activation(read: Reader, *built: str) -> None:
    """Raise WeightError for an activation that the family does not support."""
    activation = read.get("hidden_activation") or read.get("hidden_act") or read.get("activation_function")
    if activation is not None and activation not in built:
        raise read.error(f"has the activation {activation!r}; {read.architecture} is built with {' or '.join(built)}")


def decoder(
    read: Reader,
    activation: str = "silu",
    tied: bool = False,
    rotary: Mapping[str, Any] | None = None,
    theta: float = 10000.0,
) -> ModelConfig:
    """Rotary positions and gated MLPs, all layers alike.

    Where the file does not say it, the head is `tied` or not, and `theta` is that of the positions; `rotary`: their settings,
    where a family has them elsewhere.
    """
    require_activation(read, activation)
    hidden = read.size("hidden_size")
    heads, kv_heads = read.heads("num_attention_heads", "num_key_value_heads")
    if not read.get("head_dim") and hidden % heads:
        raise read.error(f"has hidden_size {hidden}, no multiple of its {heads} heads, and no head_dim")
    head_dim = read.size("head_dim", hidden // heads, MAX_HEAD_DIM)
    layer = LayerConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=read.size("intermediate_size"),
        rope=rope(read, rope_settings(read) if rotary is None else rotary, head_dim, theta),
    )
    check_layer_types(read)
    bias = bool(read.get("attention_bias", False))
    return ModelConfig(
        architecture=read.architecture,
        vocab_size=read.size("vocab_size"),
        hidden_size=hidden,
        layers=(layer,) * read.size("num_hidden_layers", most=MAX_LAYERS),
        max_position=read.size("max_position_embeddings"),
        norm_eps=read.number("rms_norm_eps"),
        tied_head=bool(read.get("tie_word_embeddings", tied)),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(read.get("mlp_bias", False)),
        attn_softcap=_optional(read, "attn_logit_softcapping"),
        logit_softcap=_optional(read, "final_logit_softcapping"),
    )


def check_layer_types(read: Reader) -> None:
    """Raise WeightError for layer_types that are not one of the two known types for each layer."""
    types, layers = read.get("layer_types"), read.size("num_hidden_layers", most=MAX_LAYERS)
    if types is None:
        return
    if not isinstance(types, list) or len(types) != layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise read.error(f"must have layer_types for its {layers} layers, each sliding_attention or full_attention")


def with_shared_kv(read: Reader, config: ModelConfig) -> ModelConfig:
    """The config with cross-layer attention of `kv_share` layers (Headrace's own key)."""
    return config.sharing(read.size("kv_share", 1, most=MAX_LAYERS))


def even_layers(read: Reader, hidden: str, heads: str, layers: str, ffn: int) -> tuple[LayerConfig, ...]:
    """Equal layers of multi-head attention without rotary positions. Arguments are keys of config.json."""
    width, count = read.size(hidden), read.size(heads)
    if width % count:
        raise read.error(f"has {hidden} {width}, no multiple of its {count} heads")
    return (LayerConfig(count, count, width // count, ffn),) * read.size(layers, most=MAX_LAYERS)


def token(read: Reader, key: str, vocab_size: int, default: int | None = None) -> int:
    """Read a token id. Raises WeightError if it is missing or outside the vocabulary."""
    value = read.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise read.error(f"must have {key} as a token id below {vocab_size}, not {value!r:.40}")
    return value


def windows(read: Reader, slides: Callable[[int], bool]) -> list[int | None]:
    """Attention window of each layer (None: all), from layer_types, otherwise for layers with `slides(layer)`."""
    layers = read.size("num_hidden_layers", most=MAX_LAYERS)
    if read.get("sliding_window") is None:
        return [None] * layers
    window, types = read.size("sliding_window"), read.get("layer_types")
    if types is None:
        return [window if slides(layer) else None for layer in range(layers)]
    return [window if kind == "sliding_attention" else None for kind in types]


def rope_settings(read: Reader) -> Mapping[str, Any]:
    """The rotary settings in the new form."""
    old = {"rope_theta": read.get("rope_theta"), **(read.get("rope_scaling") or {})}
    new: Mapping[str, Any] | None = read.get("rope_parameters")
    return old if new is None else new


def rope(read: Reader, settings: Mapping[str, Any], head_dim: int, theta: float) -> RopeConfig:
    """RopeConfig of settings in the new form. theta: default base."""
    own = replace(read, values=settings)
    kind = own.get("rope_type") or own.get("type") or "default"
    share = float(own.get("partial_rotary_factor") or read.get("partial_rotary_factor") or 1.0)
    dim = None if share == 1.0 or kind == "proportional" else int(head_dim * share)
    config = RopeConfig(own.number("rope_theta", theta), dim)
    if kind not in SCALINGS:
        raise read.error(f"asks for the rotary scaling {kind!r}; known are {', '.join(SCALINGS)}")
    if kind == "linear":
        config = replace(config, scaling="linear", factor=own.number("factor"))
    if kind == "proportional":
        turned, factor = int(share * head_dim // 2), own.number("factor", 1.0)
        config = replace(config, scaling="divisors", divisors=(factor,) * turned + (math.inf,) * (head_dim // 2 - turned))
    if kind in ("llama3", "yarn", "longrope"):
        # YaRN's files may leave out the original context, which is then the model's.
        longest = read.get("max_position_embeddings") if kind == "yarn" else None
        original = read.get("original_max_position_embeddings", longest)
        config = replace(config, original_context=own.size("original_max_position_embeddings", original, least=2))
    if kind == "llama3":
        low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
        config = replace(config, scaling="llama3", factor=own.number("factor"), low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        config = _yarn(own, config, read.size("max_position_embeddings"))
    if kind == "longrope":
        config = _longrope(own, config, read.size("max_position_embeddings"))
    return check_rope(config, head_dim, read.error)


def _yarn(own: Reader, config: RopeConfig, longest: int) -> RopeConfig:
    """The settings with YaRN. longest: the model's context."""
    factor = own.number("factor", longest / config.original_context)
    amplitude = magnitude(factor)
    if own.get("mscale") and own.get("mscale_all_dim"):
        amplitude = magnitude(factor, own.number("mscale")) / magnitude(factor, own.number("mscale_all_dim"))
    return replace(
        config,
        scaling="yarn",
        factor=factor,
        beta_fast=own.number("beta_fast", 32.0),
        beta_slow=own.number("beta_slow", 1.0),
        truncate=bool(own.get("truncate", True)),
        amplitude=own.number("attention_factor", amplitude),
    )


def _longrope(own: Reader, config: RopeConfig, longest: int) -> RopeConfig:
    """The settings with LongRoPE: divisors for long contexts, and `short` ones. longest: the model's context.

    Source: Ding et al., "LongRoPE", arXiv 2402.13753.
    """
    short, long = own.numbers("short_factor"), own.numbers("long_factor")
    factor, original = own.number("factor", longest / config.original_context), config.original_context
    amplitude = own.number("attention_factor", long_amplitude(factor, original))
    config = replace(config, scaling="divisors", divisors=long, short=short, amplitude=amplitude)
    return config if longest > original else replace(config, divisors=short)


def _optional(read: Reader, key: str) -> float | None:
    return None if read.get(key) is None else read.number(key)
