"""Where each parameter's values are in a file: one map per container and architecture. It owns the layout differences.

Keys are our parameters by part ("layers.{i}.qkv.q.weight"), values say which tensor holds it and how it is laid out there:

* GGUF stores llama's q and k rows as rotary pairs (0, d/2, 1, d/2 + 1, ...) of each head, because llama.cpp turns neighbours;
* GGUF stores gemma's norms as 1 + w, which is what is multiplied; Hugging Face stores w;
* Hugging Face stores GPT-2's linears [in, out] (Conv1D); both store its q, k and v as one tensor.
"""

from dataclasses import dataclass, replace
from typing import Literal

Layout = Literal["plain", "rope_pairs", "transposed", "minus_one"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensor a part comes from. `third`: which third of its output rows (0 q, 1 k, 2 v), or None: all of it."""

    name: str
    layout: Layout = "plain"
    third: int | None = None


@dataclass(frozen=True, slots=True)
class NameMap:
    """`prefix` may stand before every name or be missing (a base model saved alone). `ignored`: patterns of tensors that
    files carry and nothing needs."""

    names: dict[str, Origin]
    prefix: str = ""
    ignored: tuple[str, ...] = ()

    def full(self, name: str) -> str:
        """A name as files usually have it."""
        return name if name.startswith("lm_head.") else self.prefix + name


def name_map(container: str, architecture: str) -> NameMap:
    """The map of a container (gguf | safetensors) and an architecture of models.registry."""
    return (_GGUF if container == "gguf" else _HF)[architecture]


def _map(names: dict[str, str]) -> dict[str, Origin]:
    """Entries without a field stand for weight and bias both."""
    made = {}
    for target, origin in names.items():
        if target.endswith((".weight", ".bias")):
            made[target] = Origin(origin)
        else:
            made |= {f"{target}.{field}": Origin(f"{origin}.{field}") for field in ("weight", "bias")}
    return made


def _lay(names: dict[str, Origin], layout: Layout, *endings: str) -> dict[str, Origin]:
    """The same map with a layout for every target that ends so."""
    return {target: replace(o, layout=layout) if target.endswith(endings) else o for target, o in names.items()}


_DECODER_GGUF = _map(
    {
        "tokens.weight": "token_embd.weight",
        "norm": "output_norm",
        "output": "output",
        "layers.{i}.attn_norm": "blk.{i}.attn_norm",
        "layers.{i}.qkv.q": "blk.{i}.attn_q",
        "layers.{i}.qkv.k": "blk.{i}.attn_k",
        "layers.{i}.qkv.v": "blk.{i}.attn_v",
        "layers.{i}.q_norm": "blk.{i}.attn_q_norm",
        "layers.{i}.k_norm": "blk.{i}.attn_k_norm",
        "layers.{i}.out": "blk.{i}.attn_output",
        "layers.{i}.mlp_norm": "blk.{i}.ffn_norm",
        "layers.{i}.gate_up.gate": "blk.{i}.ffn_gate",
        "layers.{i}.gate_up.up": "blk.{i}.ffn_up",
        "layers.{i}.up": "blk.{i}.ffn_up",
        "layers.{i}.down": "blk.{i}.ffn_down",
        "layers.{i}.attn_post_norm": "blk.{i}.post_attention_norm",
        "layers.{i}.mlp_post_norm": "blk.{i}.post_ffw_norm",
    }
)
_GPT2_GGUF = {
    **_DECODER_GGUF,
    "positions.weight": Origin("position_embd.weight"),
    **{
        f"layers.{{i}}.qkv.{part}.{field}": Origin(f"blk.{{i}}.attn_qkv.{field}", third=third)
        for third, part in enumerate("qkv")
        for field in ("weight", "bias")
    },
}
# rope_freqs.weight is no parameter: models.gguf_config has read it into RopeConfig.divisors.
_DIVISORS = (r"rope_freqs\.weight",)
_GGUF = {
    "llama": NameMap(
        _lay(_DECODER_GGUF, "rope_pairs", "qkv.q.weight", "qkv.k.weight", "qkv.q.bias", "qkv.k.bias"), ignored=_DIVISORS
    ),
    "qwen2": NameMap(_DECODER_GGUF, ignored=_DIVISORS),
    "qwen3": NameMap(_DECODER_GGUF, ignored=_DIVISORS),
    "gemma3_text": NameMap(_DECODER_GGUF, ignored=_DIVISORS),
    "gpt2": NameMap(_GPT2_GGUF),
}

_DECODER_HF = _map(
    {
        "tokens.weight": "embed_tokens.weight",
        "norm": "norm",
        "output": "lm_head",
        "layers.{i}.attn_norm": "layers.{i}.input_layernorm",
        "layers.{i}.qkv.q": "layers.{i}.self_attn.q_proj",
        "layers.{i}.qkv.k": "layers.{i}.self_attn.k_proj",
        "layers.{i}.qkv.v": "layers.{i}.self_attn.v_proj",
        "layers.{i}.q_norm": "layers.{i}.self_attn.q_norm",
        "layers.{i}.k_norm": "layers.{i}.self_attn.k_norm",
        "layers.{i}.out": "layers.{i}.self_attn.o_proj",
        "layers.{i}.mlp_norm": "layers.{i}.post_attention_layernorm",
        "layers.{i}.gate_up.gate": "layers.{i}.mlp.gate_proj",
        "layers.{i}.gate_up.up": "layers.{i}.mlp.up_proj",
        "layers.{i}.down": "layers.{i}.mlp.down_proj",
    }
)
_GEMMA3_HF = _lay(
    _DECODER_HF
    | _map(
        {
            "layers.{i}.attn_post_norm": "layers.{i}.post_attention_layernorm",
            "layers.{i}.mlp_norm": "layers.{i}.pre_feedforward_layernorm",
            "layers.{i}.mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
        }
    ),
    "minus_one",
    "norm.weight",
)
_GPT2_HF = _lay(
    _map(
        {
            "tokens.weight": "wte.weight",
            "positions.weight": "wpe.weight",
            "norm": "ln_f",
            "output": "lm_head",
            "layers.{i}.attn_norm": "h.{i}.ln_1",
            "layers.{i}.out": "h.{i}.attn.c_proj",
            "layers.{i}.mlp_norm": "h.{i}.ln_2",
            "layers.{i}.up": "h.{i}.mlp.c_fc",
            "layers.{i}.down": "h.{i}.mlp.c_proj",
        }
    )
    | {
        f"layers.{{i}}.qkv.{part}.{field}": Origin(f"h.{{i}}.attn.c_attn.{field}", third=third)
        for third, part in enumerate("qkv")
        for field in ("weight", "bias")
    },
    "transposed",
    *(f".{name}.weight" for name in ("q", "k", "v", "out", "up", "down")),
)
_BERT_HF = _map(
    {
        "tokens.weight": "embeddings.word_embeddings.weight",
        "positions.weight": "embeddings.position_embeddings.weight",
        "types.weight": "embeddings.token_type_embeddings.weight",
        "embed_norm": "embeddings.LayerNorm",
        "layers.{i}.qkv.q": "encoder.layer.{i}.attention.self.query",
        "layers.{i}.qkv.k": "encoder.layer.{i}.attention.self.key",
        "layers.{i}.qkv.v": "encoder.layer.{i}.attention.self.value",
        "layers.{i}.out": "encoder.layer.{i}.attention.output.dense",
        "layers.{i}.attn_norm": "encoder.layer.{i}.attention.output.LayerNorm",
        "layers.{i}.up": "encoder.layer.{i}.intermediate.dense",
        "layers.{i}.down": "encoder.layer.{i}.output.dense",
        "layers.{i}.mlp_norm": "encoder.layer.{i}.output.LayerNorm",
    }
)
# Buffers that old checkpoints saved with their weights.
_INV_FREQ = (r"(.*\.)?rotary_emb\.inv_freq",)
_CAUSAL_MASK = (r"h\.\d+\.attn\.(masked_)?bias",)
# What bert was trained with and embeddings do not need.
_HEADS_OF_BERT = (r"pooler\..*", r"cls\..*", r"embeddings\.position_ids")
_HF = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), NameMap(_DECODER_HF, "model.", _INV_FREQ)),
    "gemma3_text": NameMap(_GEMMA3_HF, "model.", _INV_FREQ),
    "gpt2": NameMap(_GPT2_HF, "transformer.", _CAUSAL_MASK),
    "bert": NameMap(_BERT_HF, "bert.", _HEADS_OF_BERT),
}
