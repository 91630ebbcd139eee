"""ModelConfig from the config.json of a Hugging Face folder, in its old form (rope_theta, rope_scaling) and its new one
(rope_parameters)."""

import math
from collections.abc import Mapping
from typing import Any

from headrace.data.config import ModelConfig, RopeConfig
from headrace.models.limits import MAX_LAYERS, MAX_SIZE, check_rope
from headrace.weights.source import WeightError

# Settings that change the mathematics and are not built: the value that means "off" for each.
OFF: dict[str, object] = {
    "quantization_config": None,
    "use_bidirectional_attention": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "is_decoder": False,
}
ACTIVATIONS = {"gemma3_text": ("gelu_pytorch_tanh",), "gpt2": ("gelu_new", "gelu_pytorch_tanh"), "bert": ("gelu",)}
TIED_BY_DEFAULT = ("gemma3_text", "gpt2")


class _Reader:
    """Looks keys up and says in one line what is wrong with them."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def error(self, what: str) -> WeightError:
        return WeightError(f"{self.where}: config.json {what}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.error(f"must have {key} as an integer from 1 to {most}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(f"must have {key} as a number above 0, not {value!r}")
        return float(value)


def config_from_hf(architecture: str, config: Mapping[str, Any], where: str) -> ModelConfig:
    """`where` names the folder in errors. Raises WeightError on a missing number or a setting that is not built."""
    read = _Reader(config, where)
    for key, off in OFF.items():
        if key in config and config[key] not in (off, None):
            raise read.error(f"asks for {key}, which is not built; use a checkpoint without it")
    if architecture == "bert" and read.get("position_embedding_type", "absolute") != "absolute":
        raise read.error("asks for relative positions, which bert is not built with; use a checkpoint with absolute ones")
    activation = read.get("hidden_activation") or read.get("hidden_act") or read.get("activation_function")
    allowed = ACTIVATIONS.get(architecture, ("silu",))
    if activation is not None and activation not in allowed:
        raise read.error(f"has the activation {activation!r}; {architecture} is built with {' or '.join(allowed)}")
    special = {"gpt2": _gpt2, "bert": _bert}
    return special[architecture](read) if architecture in special else _decoder(architecture, read)


def _decoder(architecture: str, read: _Reader) -> ModelConfig:
    """The family with rotary positions and gated MLPs: llama, mistral, qwen2, qwen3, gemma3."""
    hidden, heads, layers = (
        read.size("hidden_size"),
        read.size("num_attention_heads"),
        read.size("num_hidden_layers", most=MAX_LAYERS),
    )
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise read.error(f"has {heads} heads for {kv_heads} KV heads; the first must be a multiple of the second")
    if not read.get("head_dim") and hidden % heads:
        raise read.error(f"has hidden_size {hidden}, no multiple of its {heads} heads, and no head_dim")
    head_dim = read.size("head_dim", hidden // heads)
    gemma = architecture == "gemma3_text"
    bias = bool(read.get("attention_bias", False))
    window, sliding = _windows(architecture, read, layers)
    rope, rope_local = _ropes(read, head_dim, gemma)
    return ModelConfig(
        architecture=architecture,
        vocab_size=read.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=read.size("intermediate_size"),
        max_position=read.size("max_position_embeddings"),
        norm_eps=read.number("rms_norm_eps"),
        rope=rope,
        rope_local=rope_local,
        tied_head=bool(read.get("tie_word_embeddings", architecture in TIED_BY_DEFAULT)),
        qkv_bias=True if architecture == "qwen2" else bias,
        out_bias=False if architecture == "qwen2" else bias,
        mlp_bias=bool(read.get("mlp_bias", False)),
        sliding_window=window,
        sliding_layers=sliding,
        attn_scale=read.number("query_pre_attn_scalar") ** -0.5 if gemma else None,
        attn_softcap=_optional(read, "attn_logit_softcapping"),
        logit_softcap=_optional(read, "final_logit_softcapping"),
        embed_scale=hidden**0.5 if gemma else 1.0,
    )


def _split(read: _Reader, width: str, count: str) -> tuple[int, int]:
    """The width of a model and its number of heads, which share it evenly."""
    hidden, heads = read.size(width), read.size(count)
    if hidden % heads:
        raise read.error(f"has {width} {hidden}, no multiple of its {heads} heads")
    return hidden, heads


def _gpt2(read: _Reader) -> ModelConfig:
    hidden, heads = _split(read, "n_embd", "n_head")
    return ModelConfig(
        architecture="gpt2",
        vocab_size=read.size("vocab_size"),
        hidden_size=hidden,
        num_layers=read.size("n_layer", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=read.size("n_inner", 4 * hidden),
        max_position=read.size("n_positions"),
        norm_eps=read.number("layer_norm_epsilon"),
        tied_head=bool(read.get("tie_word_embeddings", True)),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def _bert(read: _Reader) -> ModelConfig:
    hidden, heads = _split(read, "hidden_size", "num_attention_heads")
    return ModelConfig(
        architecture="bert",
        vocab_size=read.size("vocab_size"),
        hidden_size=hidden,
        num_layers=read.size("num_hidden_layers", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=read.size("intermediate_size"),
        max_position=read.size("max_position_embeddings"),
        norm_eps=read.number("layer_norm_eps", 1e-12),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        encoder=True,
        token_types=read.size("type_vocab_size", 2),
    )


def _windows(architecture: str, read: _Reader, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The sliding window, and which layers slide (empty: all of them, or there is no window)."""
    window = read.get("sliding_window")
    if window is None or (architecture.startswith("qwen") and not read.get("use_sliding_window", False)):
        return None, ()
    if architecture == "llama":
        raise read.error("asks for sliding_window, which llama does not have; is it a mistral?")
    window = read.size("sliding_window")
    types = read.get("layer_types")
    if types is not None:
        if len(types) != layers or not set(types) <= {"sliding_attention", "full_attention"}:
            raise read.error(f"must have layer_types for its {layers} layers, each sliding_attention or full_attention")
        return window, tuple(kind == "sliding_attention" for kind in types)
    if architecture == "mistral":
        return window, ()
    if architecture == "gemma3_text":
        pattern = read.size("sliding_window_pattern", 6)
        return window, tuple((i + 1) % pattern != 0 for i in range(layers))
    first = read.get("max_window_layers", layers)
    return window, tuple(i >= first for i in range(layers))


def _ropes(read: _Reader, head_dim: int, gemma: bool) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary settings, and gemma's second ones for sliding layers."""
    new = read.get("rope_parameters")
    if not gemma:
        parameters = new if new is not None else {"rope_theta": read.get("rope_theta"), **(read.get("rope_scaling") or {})}
        return check_rope(_rope(read, parameters, head_dim, 10000.0), head_dim, read.error), None
    if new is None:
        new = {
            "full_attention": {"rope_theta": read.get("rope_theta"), **(read.get("rope_scaling") or {})},
            "sliding_attention": {"rope_theta": read.get("rope_local_base_freq")},
        }
    full, sliding = new.get("full_attention") or {}, new.get("sliding_attention") or {}
    ropes = _rope(read, full, head_dim, 1000000.0), _rope(read, sliding, head_dim, 10000.0)
    return check_rope(ropes[0], head_dim, read.error), check_rope(ropes[1], head_dim, read.error)


def _rope(read: _Reader, parameters: Mapping[str, Any], head_dim: int, theta: float) -> RopeConfig:
    rope = _Reader(parameters, read.where)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    share = float(rope.get("partial_rotary_factor") or read.get("partial_rotary_factor") or 1.0)
    common: dict[str, Any] = {"theta": rope.number("rope_theta", theta), "dim": None if share == 1.0 else int(head_dim * share)}
    if kind == "default":
        return RopeConfig(**common)
    if kind == "linear":
        return RopeConfig(**common, scaling="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            **common,
            scaling="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context=rope.size("original_max_position_embeddings"),
        )
    raise read.error(f"asks for the rotary scaling {kind!r}; known are default, linear and llama3")


def _optional(read: _Reader, key: str) -> float | None:
    return None if read.get(key) is None else read.number(key)
