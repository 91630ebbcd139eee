"""Config of a model from a GGUF file, and GGUF metadata from a config, for decoders.

The config comes from the metadata (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), and from the tensors for
vocabulary, biases, tied head and Llama 3's frequency divisors.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from headrace.data.config import LayerConfig, ModelConfig, RopeConfig
from headrace.models.layers import frequencies
from headrace.models.reader import MAX_HEAD_DIM, MAX_LAYERS, Reader, check_rope, long_amplitude, magnitude
from headrace.weights.source import WeightError

# Llama 3's divisors of the rotary frequencies, and LongRoPE's.
ROPE_DIVISORS = "rope_freqs.weight"
LONG_DIVISORS, SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"
SCALINGS = ("none", "linear", "yarn", "longrope")
# Number formats of the divisors.
FLOATS = {"F32": "<f4", "F16": "<f2"}
# Families whose GGUF files have the name of another one.
SHARED_NAMES = {"mistral": "llama", "internlm3": "llama", "olmo3": "olmo2"}
# Architectures whose multipliers are metadata.
MULTIPLIED = ("granite", "minicpm")
KNOWN = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


def decoder(read: Reader, eps: str = "attention.layer_norm_rms_epsilon", rotary: bool = True) -> ModelConfig:
    """Config of a decoder with equal layers, and one window if the file has one. eps: metadata key of the norms' epsilon."""
    names = set(read.source.names())
    hidden = read.size("embedding_length")
    heads, kv_heads = read.heads("attention.head_count", "attention.head_count_kv")
    head_dim = read.size("attention.key_length", hidden // heads, MAX_HEAD_DIM)
    if read.size("attention.value_length", head_dim) != head_dim:
        raise read.error("asks for keys and values of different widths, which are not built")
    layer = LayerConfig(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=read.size("feed_forward_length"),
        window=read.size("attention.sliding_window") if read.get("attention.sliding_window") else None,
        rope=check_rope(_rope(read, head_dim), head_dim, read.error) if rotary else None,
    )
    return ModelConfig(
        architecture=read.architecture,
        vocab_size=read.source.info("token_embd.weight").shape[0],
        hidden_size=hidden,
        layers=(layer,) * read.size("block_count", most=MAX_LAYERS),
        max_position=read.size("context_length"),
        norm_eps=read.number(eps),
        tied_head="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
        out_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        attn_softcap=_softcap(read, "attn_logit_softcapping"),
        logit_softcap=_softcap(read, "final_logit_softcapping"),
    )


def _rope(read: Reader, head_dim: int) -> RopeConfig:
    dim = read.size("rope.dimension_count", head_dim)
    rope = RopeConfig(read.number("rope.freq_base", 10000.0), None if dim == head_dim else dim)
    kind = read.get("rope.scaling.type", "none")
    factor = read.number("rope.scaling.factor", read.get("rope.scale_linear", 1.0))
    if kind not in SCALINGS:
        raise read.error(f"asks for the rotary scaling {kind!r}; known are {', '.join(SCALINGS)}, llama3 ({ROPE_DIVISORS})")
    if LONG_DIVISORS in read.source.names():
        return _longrope(read, rope)
    if kind == "yarn":
        return _yarn(read, rope, factor)
    if kind == "none" and read.get("rope.scale_linear") is None:
        factor = 1.0
    if ROPE_DIVISORS in read.source.names():
        divisors = tuple(d * factor for d in _divisors(read, ROPE_DIVISORS))
        return RopeConfig(rope.theta, rope.dim, "divisors", divisors=divisors)
    return rope if factor == 1.0 else RopeConfig(rope.theta, rope.dim, "linear", factor)


def _yarn(read: Reader, rope: RopeConfig, factor: float) -> RopeConfig:
    """The settings with YaRN. The amplitude is that of llama.cpp: a logarithmic multiplier of 0 is none."""
    multiplier = read.get("rope.scaling.yarn_log_multiplier")
    amplitude = magnitude(factor) / (magnitude(factor, multiplier) if multiplier else 1.0)
    return replace(
        rope,
        scaling="yarn",
        factor=factor,
        original_context=read.size("rope.scaling.original_context_length", read.get("context_length"), least=2),
        beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
        amplitude=amplitude * read.number("rope.scaling.attn_factor", 1.0),
    )


def _longrope(read: Reader, rope: RopeConfig) -> RopeConfig:
    """The settings with LongRoPE's divisors for long and for short contexts."""
    longest = read.size("context_length")
    original = read.size("rope.scaling.original_context_length", longest, least=2)
    long, short = (tuple(_divisors(read, name)) for name in (LONG_DIVISORS, SHORT_DIVISORS))
    amplitude = read.number("rope.scaling.attn_factor", long_amplitude(longest / original, original))
    rope = replace(rope, scaling="divisors", divisors=long, short=short, original_context=original, amplitude=amplitude)
    return rope if longest > original else replace(rope, divisors=short)


def _divisors(read: Reader, name: str) -> list[float]:
    """The frequency divisors in a tensor."""
    kind = read.source.info(name).kind
    if kind not in FLOATS:
        raise read.error(f"goes with {name} stored as {kind}; known are {' and '.join(FLOATS)}")
    stored = np.ascontiguousarray(read.source.raw(name)).reshape(-1)
    divisors: list[float] = stored.view(FLOATS[kind]).astype(np.float64).tolist()
    return divisors


def windows(read: Reader, config: ModelConfig, period: int) -> list[int | None]:
    """Attention window of each layer (None: all), with the file's pattern, otherwise for all but every `period`-th layer."""
    count, window = config.num_layers, config.layers[0].window
    pattern = read.get("attention.sliding_window_pattern", period)
    slides = [(i + 1) % pattern != 0 for i in range(count)] if isinstance(pattern, int) else list(pattern)
    if len(slides) != count:
        raise read.error(f"has attention.sliding_window_pattern of {len(slides)} entries for {count} layers")
    return [window if each else None for each in slides]


def _softcap(read: Reader, key: str) -> float | None:
    return read.number(key) if read.get(key) else None


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
    """The config with GGUF's name of the architecture, where that is the name of another family."""
    return replace(config, architecture=SHARED_NAMES.get(config.architecture, config.architecture))


def metadata(config: ModelConfig, name: str = "") -> dict[str, Any]:
    """Metadata keys of a config from `stored_config`, or of another decoder. name: general.architecture, if different."""
    layer, name = config.full_layer, name or config.architecture
    eps = "layer_norm_epsilon" if name == "gpt2" else "layer_norm_rms_epsilon"
    keys: dict[str, Any] = {
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        f"attention.{eps}": config.norm_eps,
        "vocab_size": config.vocab_size,
    }
    if layer.rope is not None:
        keys |= {"rope.dimension_count": layer.rope.dim or layer.head_dim, "rope.freq_base": layer.rope.theta}
        keys |= _scaling_keys(layer.rope)
        if name == "olmo2" and layer.rope.scaling == "yarn" and any(one.window for one in config.layers):
            keys["rope.scaling.attn_factor"] = layer.rope.amplitude  # OLMo 3's files have the product
        if layer.rope.growth:
            keys["attention.temperature_scale"] = layer.rope.growth
    keys |= _window_keys(config) | _softcap_keys(config)
    if name in MULTIPLIED:
        keys |= {"embedding_scale": config.embed_scale, "residual_scale": 1.0, "logit_scale": 1 / config.head_scale}
        keys |= {"attention.scale": config.attn_scale} if config.attn_scale is not None else {}
    return {"general.architecture": name} | shape_keys(name, config) | {f"{name}.{key}": value for key, value in keys.items()}


def _scaling_keys(rope: RopeConfig) -> dict[str, Any]:
    if rope.scaling == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    if rope.short:
        return {"rope.scaling.original_context_length": rope.original_context, "rope.scaling.attn_factor": rope.amplitude}
    if rope.scaling != "yarn":
        return {}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope.factor,
        "rope.scaling.original_context_length": rope.original_context,
        "rope.scaling.yarn_beta_fast": rope.beta_fast,
        "rope.scaling.yarn_beta_slow": rope.beta_slow,
        "rope.scaling.attn_factor": rope.amplitude / magnitude(rope.factor),
    }


def _window_keys(config: ModelConfig) -> dict[str, Any]:
    """The window, which layers have it, and their rotary base."""
    local = next((layer for layer in config.layers if layer.window is not None), None)
    if local is None:
        return {}
    keys: dict[str, Any] = {"attention.sliding_window": local.window}
    if config.full_layer.window is None:
        keys["attention.sliding_window_pattern"] = np.array([layer.window is not None for layer in config.layers])
    return keys if local.rope is None else keys | {"rope.freq_base_swa": local.rope.theta}


def _softcap_keys(config: ModelConfig) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": config.attn_softcap, "final_logit_softcapping": config.logit_softcap}
    return {key: cap for key, cap in caps.items() if cap is not None}


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
    """Tensors of a GGUF file that are not parameters: the frequency divisors of a rotary scaling, float32."""
    layer = config.full_layer
    if (rope := layer.rope) is None or rope.scaling not in ("llama3", "divisors"):
        return {}
    if rope.short:
        lists = {LONG_DIVISORS: rope.divisors, SHORT_DIVISORS: rope.short}
        return {name: np.array(divisors, np.float32) for name, divisors in lists.items()}
    dim = rope.dim or layer.head_dim
    if rope.scaling == "divisors":
        return {ROPE_DIVISORS: np.array(rope.divisors, np.float32)}
    plain = frequencies(replace(rope, scaling="none"), dim)
    return {ROPE_DIVISORS: (plain / frequencies(rope, dim)).astype(np.float32)}
