"""Tiny folders in the formats of others, written by plain arithmetic of the formats' own documents, and what they stand for."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 2, 1, 32, 80
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": FFN,
    "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "vocab_size": VOCAB, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
LAYER = "model.layers.0"
MATRICES = {
    f"{LAYER}.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    f"{LAYER}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    f"{LAYER}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    f"{LAYER}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    f"{LAYER}.mlp.gate_proj": (FFN, HIDDEN),
    f"{LAYER}.mlp.up_proj": (FFN, HIDDEN),
    f"{LAYER}.mlp.down_proj": (HIDDEN, FFN),
}
Tensors = dict[str, np.ndarray]


@dataclass
class Made:
    """A model: the tensors of its compressed folder, what its settings say, and its matrices in float32."""

    settings: dict[str, Any]
    tensors: Tensors = field(default_factory=dict)
    values: Tensors = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        return write(folder, {**LLAMA, "quantization_config": self.settings}, self.tensors)

    def write_dense(self, folder: Path) -> Path:
        """The same numbers, not compressed."""
        plain = {name: x for name, x in self.tensors.items() if name.rpartition(".")[0] not in MATRICES}
        return write(folder, LLAMA, {**plain, **{f"{name}.weight": x for name, x in self.values.items()}})


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def others(rng: np.random.Generator) -> Tensors:
    """What is no matrix of a layer, in numbers that bfloat16 and float16 hold."""
    made = {"model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)) * 0.5, "model.norm.weight": np.ones(HIDDEN)}
    for name in ("input_layernorm", "post_attention_layernorm"):
        made[f"{LAYER}.{name}.weight"] = 1 + rng.standard_normal(HIDDEN) * 0.1
    return {
        name: (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float16)
        for name, x in made.items()
    }


def words(fields: np.ndarray, bits: int) -> np.ndarray:
    """int32 words of the last axis, the first field lowest; a field below 0 takes one from the next, as subtraction does."""
    each = 32 // bits
    parts = fields.reshape(*fields.shape[:-1], -1, each).astype(object)
    whole = sum(parts[..., i] * (1 << bits * i) for i in range(each)) % 2**32
    return whole.astype(np.uint32).view(np.int32)


def gptq(
    bits: int = 4, group: int = 32, *, sym: bool = True, act_order: bool = False, version: int = 1, seed: int = 0, **said: Any
) -> Made:
    """w = scale * (q - zero): words of qweight along the inputs, of qzeros along the outputs. Version 1 stores zero - 1."""
    rng = np.random.default_rng(seed)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act_order, **said}
    if version == 2:
        settings["checkpoint_format"] = "gptq_v2"
    made = Made(settings, others(rng))
    for name, (n, k) in MATRICES.items():
        groups, most = (1 if group == -1 else k // group), (1 << bits) - 1
        index = np.arange(k) // (k // groups)
        index = rng.permutation(index) if act_order else index
        q = rng.integers(0, most + 1, (n, k))
        zero = np.full((groups, n), 1 << bits - 1) if sym else rng.integers(0, most + 1, (groups, n))
        scale = (rng.uniform(0.2, 1, (groups, n)) * 2 / most / k**0.5).astype(np.float16)
        made.tensors[f"{name}.qweight"] = words(q, bits).T
        made.tensors[f"{name}.qzeros"] = words(zero - (version == 1), bits)
        made.tensors[f"{name}.scales"] = scale
        made.tensors[f"{name}.g_idx"] = index.astype(np.int32)
        made.values[name] = scale[index].T.astype(np.float32) * (q - zero[index].T).astype(np.float32)
    return made
