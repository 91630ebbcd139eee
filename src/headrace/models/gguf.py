"""Config of a model from a GGUF file: its metadata (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), and its tensors
for vocabulary, biases, tied head and Llama 3's frequency divisors."""

import numpy as np

from headrace.data.config import LayerConfig, ModelConfig, RopeConfig
from headrace.models.reader import MAX_HEAD_DIM, MAX_LAYERS, Reader, check_rope

ROPE_DIVISORS = "rope_freqs.weight"
# Number formats of the divisors.
FLOATS = {"F32": "<f4", "F16": "<f2"}


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
    made = RopeConfig(read.number("rope.freq_base", 10000.0), None if dim == head_dim else dim)
    kind = read.get("rope.scaling.type", "none")
    factor = read.number("rope.scaling.factor", read.get("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise read.error(f"asks for the rotary scaling {kind!r}; known are none, linear and llama3 ({ROPE_DIVISORS})")
    if kind == "none" and read.get("rope.scale_linear") is None:
        factor = 1.0
    if ROPE_DIVISORS in read.source.names():
        return RopeConfig(made.theta, made.dim, "divisors", divisors=tuple(d * factor for d in _divisors(read)))
    return made if factor == 1.0 else RopeConfig(made.theta, made.dim, "linear", factor)


def _divisors(read: Reader) -> list[float]:
    """Llama 3's frequency divisors."""
    kind = read.source.info(ROPE_DIVISORS).kind
    if kind not in FLOATS:
        raise read.error(f"goes with {ROPE_DIVISORS} stored as {kind}; known are {' and '.join(FLOATS)}")
    stored = np.ascontiguousarray(read.source.raw(ROPE_DIVISORS)).reshape(-1)
    found: list[float] = stored.view(FLOATS[kind]).astype(np.float64).tolist()
    return found


def _softcap(read: Reader, key: str) -> float | None:
    return read.number(key) if read.get(key) else None
