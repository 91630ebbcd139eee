"""ModelConfig from the metadata of a GGUF file (keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), and from
its tensors where the metadata is silent: vocabulary, biases, tied head, Llama 3's frequency divisors."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.data.config import ModelConfig, RopeConfig
from headrace.models.limits import MAX_LAYERS, MAX_SIZE, check_rope
from headrace.weights.source import WeightError, WeightSource

ROPE_DIVISORS = "rope_freqs.weight"
FLOATS = {"F32": "<f4", "F16": "<f2"}  # that it is stored as
GEMMA3_PATTERN = 6  # every sixth layer is full, where the file does not say
GEMMA3_27B_LAYERS = 62  # the one size whose queries are scaled by hidden / heads, which files do not say either


class _Reader:
    """Looks up `<architecture>.<key>` and says in one line what is wrong with it."""

    def __init__(self, prefix: str, metadata: Mapping[str, Any], where: str) -> None:
        self.prefix = prefix
        self.metadata = metadata
        self.where = where

    def error(self, what: str) -> WeightError:
        return WeightError(f"{self.where}: {what}")

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.prefix}.{key}", default)

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.error(f"metadata must have {self.prefix}.{key} as an integer from 1 to {most}, not {_shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(f"metadata must have {self.prefix}.{key} as a number above 0, not {_shown(value)}")
        return float(value)


def _shown(value: object) -> str:
    return repr(value) if value is None or isinstance(value, (int, float, str)) else f"a list of {len(value)}"  # type: ignore[arg-type]


def config_from_gguf(architecture: str, prefix: str, metadata: Mapping[str, Any], source: WeightSource) -> ModelConfig:
    """`prefix` is what the keys begin with (general.architecture). Raises WeightError on what is missing or not built."""
    read = _Reader(prefix, metadata, str(source.path))
    names = set(source.names())
    hidden, heads, layers = (
        read.size("embedding_length"),
        read.size("attention.head_count"),
        read.size("block_count", most=MAX_LAYERS),
    )
    kv_heads = read.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise read.error(f"{heads} heads for {kv_heads} KV heads; the first must be a multiple of the second")
    head_dim = read.size("attention.key_length", hidden // heads)
    if read.size("attention.value_length", head_dim) != head_dim:
        raise read.error("keys and values of different widths are not built")
    gemma, gpt2 = architecture == "gemma3_text", architecture == "gpt2"
    window, sliding = _windows(read, layers, gemma)
    rope = None if gpt2 else check_rope(_rope(read, head_dim, source), head_dim, read.error)
    return ModelConfig(
        architecture=architecture,
        vocab_size=source.info("token_embd.weight").shape[0],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=read.size("feed_forward_length"),
        max_position=read.size("context_length"),
        norm_eps=read.number("attention.layer_norm_epsilon" if gpt2 else "attention.layer_norm_rms_epsilon"),
        rope=rope,
        rope_local=RopeConfig(theta=read.number("rope.freq_base_swa", 10000.0)) if gemma else None,
        tied_head="output.weight" not in names,
        qkv_bias="blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
        out_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        sliding_window=window,
        sliding_layers=sliding,
        attn_scale=_gemma_scale(hidden, heads, head_dim, layers) if gemma else None,
        attn_softcap=_softcap(read, "attn_logit_softcapping"),
        logit_softcap=_softcap(read, "final_logit_softcapping"),
        embed_scale=hidden**0.5 if gemma else 1.0,
    )


def _windows(read: _Reader, layers: int, gemma: bool) -> tuple[int | None, tuple[bool, ...]]:
    if not read.get("attention.sliding_window"):
        return None, ()
    window = read.size("attention.sliding_window")
    if not gemma:
        return window, ()
    pattern = read.get("attention.sliding_window_pattern", GEMMA3_PATTERN)
    if isinstance(pattern, int):
        return window, tuple((i + 1) % pattern != 0 for i in range(layers))
    if len(pattern) != layers:
        raise read.error(f"attention.sliding_window_pattern has {len(pattern)} entries for {layers} layers")
    return window, tuple(bool(slides) for slides in pattern)


def _rope(read: _Reader, head_dim: int, source: WeightSource) -> RopeConfig:
    dim = read.size("rope.dimension_count", head_dim)
    common: dict[str, Any] = {"theta": read.number("rope.freq_base", 10000.0), "dim": None if dim == head_dim else dim}
    kind = read.get("rope.scaling.type", "none")
    factor = read.number("rope.scaling.factor", read.get("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise read.error(f"asks for the rotary scaling {kind!r}; known are none, linear and llama3 ({ROPE_DIVISORS})")
    if kind == "none" and f"{read.prefix}.rope.scale_linear" not in read.metadata:
        factor = 1.0
    if ROPE_DIVISORS in source.names():
        divisors = _divisors(read, source)
        return RopeConfig(**common, scaling="divisors", divisors=tuple(d * factor for d in divisors))
    if factor != 1.0:
        return RopeConfig(**common, scaling="linear", factor=factor)
    return RopeConfig(**common)


def _divisors(read: _Reader, source: WeightSource) -> list[float]:
    """Llama 3's frequency divisors, as they are stored."""
    kind = source.info(ROPE_DIVISORS).kind
    if kind not in FLOATS:
        raise read.error(f"stores {ROPE_DIVISORS} as {kind}; known are {' and '.join(FLOATS)}")
    stored = np.ascontiguousarray(source.raw(ROPE_DIVISORS)).reshape(-1)
    found: list[float] = stored.view(FLOATS[kind]).astype(np.float64).tolist()
    return found


def _gemma_scale(hidden: int, heads: int, head_dim: int, layers: int) -> float:
    return float(hidden // heads if layers == GEMMA3_27B_LAYERS else head_dim) ** -0.5


def _softcap(read: _Reader, key: str) -> float | None:
    return read.number(key) if read.get(key) else None
