"""Shape of a model from the keys of a config.json alone, also of architectures that Headrace does not run.

Multi-head latent attention: DeepSeek-V2, arXiv 2405.04434. State layers: Mamba, arXiv 2312.00752, and gated delta networks,
arXiv 2412.06464. Keys are those of Hugging Face.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.models.reader import MAX_LAYERS, MAX_SIZE
from headrace.startup.fit.shapes import LayerShape, Linear, Matrix, ModelShape
from headrace.weights.source import WeightError

KindOf = Callable[[str, int], str]  # (tensor name, columns) -> number format


@dataclass(frozen=True, slots=True)
class Keys:
    """Checked access to the keys of a config. place: for messages."""

    values: Mapping[str, Any]
    place: str

    def find(self, *names: str) -> int:
        """The first of the keys that is there, a size above 0; 0 if there is none. Raises WeightError for any other value."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
                raise WeightError(f"{self.place}: {name} must be an integer from 0 to {MAX_SIZE}, not {value!r}")
            return value
        return 0

    def size(self, *names: str) -> int:
        """Like `find`, but one of the keys must be there and above 0."""
        if not (found := self.find(*names)):
            raise WeightError(f"{self.place}: has no {names[0]}; use the config.json of a language model")
        return found


def shape_by_formula(values: Mapping[str, Any], place: str, name: str, kind_of: KindOf, refusal: str) -> ModelShape:
    """The shape that the keys describe. refusal: why Headrace does not run the model. Raises WeightError for missing keys."""
    text = values.get("text_config")
    keys = Keys(text if isinstance(text, Mapping) else values, place)
    hidden, vocab = keys.size("hidden_size", "n_embd", "d_model"), keys.size("vocab_size")
    count = keys.size("num_hidden_layers", "n_layer", "num_layers")
    if count > MAX_LAYERS:
        raise WeightError(f"{place}: has {count} layers and {MAX_LAYERS} is the most")
    tied = bool(keys.values.get("tie_word_embeddings", values.get("tie_word_embeddings", False)))
    table = Linear("tokens", (_matrix(kind_of, "token_embd.weight", vocab, hidden),), rows="vocab", multiplied=False)
    head = Linear("head", (_matrix(kind_of, "token_embd.weight" if tied else "output.weight", vocab, hidden),), rows="vocab")
    return ModelShape(
        name=name,
        architecture=str(values.get("model_type") or "unknown"),
        hidden=hidden,
        vocab_size=vocab,
        max_position=keys.find("max_position_embeddings", "n_positions") or 4096,
        layers=tuple(_layer(keys, at, count, hidden, kind_of) for at in range(count)),
        tables=(table,),
        head=head,
        tied=tied,
        vectors=4 * hidden,
        refusal=refusal,
        origin=f"keys of {place} (by formula)",
    )


def _matrix(kind_of: KindOf, name: str, rows: int, columns: int) -> Matrix:
    return Matrix(kind_of(name, columns), "", rows, columns)


def _layer(keys: Keys, at: int, count: int, hidden: int, kind_of: KindOf) -> LayerShape:
    def linear(name: str, rows: int, columns: int, *, split: str | None = None, cut: str | None = None, **more: Any) -> Linear:
        return Linear(name, (_matrix(kind_of, "matrix.weight", rows, columns),), split, cut, **more)

    kind = _kind_of_layer(keys, at)
    make = {"mamba": _mamba, "linear_attention": _delta}.get(kind)
    if make is not None:
        linears, state = make(keys, hidden, linear)
        # Mamba's block has no MLP of its own.
        mlp = () if kind == "mamba" and not keys.find("num_attention_heads") else _mlp(keys, at, hidden, linear)
        return LayerShape(0, 0, 0, 0, (*linears, *mlp), 8 * hidden, state_bytes=state)
    heads = keys.size("num_attention_heads", "n_head", "num_heads")
    mlp = _mlp(keys, at, hidden, linear)
    if latent := keys.find("kv_lora_rank"):
        return _latent(keys, heads, latent, hidden, mlp, linear)
    kv_heads = keys.find("num_key_value_heads") or heads
    if heads % kv_heads:
        raise WeightError(
            f"{keys.place}: has {heads} heads for {kv_heads} KV heads; the first must be a multiple of the second"
        )
    dim = keys.find("head_dim", "d_kv") or hidden // heads
    gates = 2 if keys.values.get("attn_output_gate") or keys.values.get("model_type") == "qwen3_next" else 1
    owns = at < count - keys.find("num_kv_shared_layers")
    attention = (
        linear("qkv", gates * heads * dim + (2 * kv_heads * dim if owns else 0), hidden, split="heads"),
        linear("out", hidden, heads * dim, cut="heads"),
    )
    window = keys.find("sliding_window") if kind == "sliding_attention" else 0
    return LayerShape(heads, kv_heads, dim, dim, (*attention, *mlp), 8 * hidden, window or None, owns)


def _kind_of_layer(keys: Keys, at: int) -> str:
    """full_attention, sliding_attention, linear_attention or mamba."""
    kinds = keys.values.get("layer_types") or keys.values.get("layers_block_type")
    if isinstance(kinds, list) and at < len(kinds):
        return "full_attention" if kinds[at] == "attention" else str(kinds[at])
    if keys.find("state_size") and not keys.find("num_attention_heads"):
        return "mamba"
    if interval := keys.find("full_attention_interval"):
        return "linear_attention" if (at + 1) % interval else "full_attention"
    return (
        "sliding_attention" if keys.values.get("use_sliding_window", True) and keys.find("sliding_window") else "full_attention"
    )


def _latent(keys: Keys, heads: int, latent: int, hidden: int, mlp: Any, linear: Any) -> LayerShape:
    """Multi-head latent attention: a token caches `latent` numbers and one rotated key, whatever the number of heads."""
    rope, plain, value = keys.size("qk_rope_head_dim"), keys.size("qk_nope_head_dim"), keys.size("v_head_dim")
    dim, rank = rope + plain, keys.find("q_lora_rank")
    queries = (
        (linear("q_a", rank, hidden), linear("q_b", heads * dim, rank, split="heads"))
        if rank
        else (linear("q", heads * dim, hidden, split="heads"),)
    )
    rest = (
        linear("kv_a", latent + rope, hidden),
        linear("kv_b", heads * (plain + value), latent, split="heads"),
        linear("out", hidden, heads * value, cut="heads"),
    )
    # Decoding absorbs kv_b into queries and outputs: scores and sums run over the latent vector.
    return LayerShape(heads, 1, latent + rope, latent, (*queries, *rest, *mlp), 8 * hidden, latent=latent + rope)


def _mlp(keys: Keys, at: int, hidden: int, linear: Any) -> tuple[Linear, ...]:
    """Gated MLP, or experts with a router and shared ones."""
    experts = keys.find("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    ffn = keys.find("intermediate_size", "n_inner", "d_ff") or 4 * hidden
    step, dense = keys.find("decoder_sparse_step") or 1, keys.values.get("mlp_only_layers") or ()
    if experts < 2 or at < keys.find("first_k_dense_replace") or (at + 1) % step or at in dense:
        return (linear("gate_up", 2 * ffn, hidden, split="ffn"), linear("down", hidden, ffn, cut="ffn"))
    each = keys.find("moe_intermediate_size") or ffn
    chosen = keys.size("num_experts_per_tok", "num_experts_per_token", "moe_topk")
    if chosen > experts:
        raise WeightError(f"{keys.place}: a token uses {chosen} of {experts} experts; the first must not be larger")
    shared = keys.find("shared_expert_intermediate_size") or each * keys.find("n_shared_experts")
    made = (
        linear("router", experts, hidden),
        linear("experts gate_up", 2 * each, hidden, split="experts", copies=experts, active=chosen),
        linear("experts down", hidden, each, split="experts", copies=experts, active=chosen),
    )
    if not shared:
        return made
    return (*made, linear("gate_up", 2 * shared, hidden, split="ffn"), linear("down", hidden, shared, cut="ffn"))


def _mamba(keys: Keys, hidden: int, linear: Any) -> tuple[tuple[Linear, ...], int]:
    """Selective state space: a state of inner · N float32 numbers and the last inputs of the convolution."""
    inner = keys.find("mamba_d_inner") or (keys.find("expand", "mamba_expand") or 2) * hidden
    state, width = keys.size("state_size", "mamba_d_state"), keys.find("conv_kernel", "mamba_d_conv") or 4
    rank = keys.find("time_step_rank", "mamba_dt_rank") or -(-hidden // 16)
    made = (
        linear("in", 2 * inner, hidden, split="ffn"),
        linear("x", rank + 2 * state, inner),
        linear("dt", inner, rank, split="ffn"),
        linear("out", hidden, inner, cut="ffn"),
    )
    return made, 4 * inner * (state + width - 1)


def _delta(keys: Keys, hidden: int, linear: Any) -> tuple[tuple[Linear, ...], int]:
    """Gated delta network: a state [value heads, key dim, value dim] float32 and the last inputs of the convolution."""
    key = keys.size("linear_num_key_heads") * keys.size("linear_key_head_dim")
    heads, dim = keys.size("linear_num_value_heads"), keys.size("linear_value_head_dim")
    value, width = heads * dim, keys.find("linear_conv_kernel_dim") or 4
    made = (linear("in", 2 * key + 2 * value + 2 * heads, hidden, split="heads"), linear("out", hidden, value, cut="heads"))
    return made, 4 * (heads * keys.size("linear_key_head_dim") * dim + (2 * key + value) * (width - 1))
