"""Writes a transformers model as a GGUF file with the `gguf` package: its name maps and its keys, independent of ours.

The layout rules are those of GGUF: llama's q and k rows as rotary neighbours, gemma's norms as 1 + w, GPT-2's linears
[out, in]. The file has no vocabulary.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ARCHES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "internlm3": gguf.MODEL_ARCH.LLAMA,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "bert": gguf.MODEL_ARCH.BERT,
    "xlm-roberta": gguf.MODEL_ARCH.BERT,
    "modernbert": gguf.MODEL_ARCH.MODERN_BERT,
}
# Architectures whose q and k rows lie as rotary pairs. Those of GLM-4 and ERNIE do so in both kinds of files.
PAIRS = ("llama", "mistral", "granite", "smollm3", "arcee", "internlm3", "ministral3")
ENCODERS = ("bert", "xlm-roberta", "modernbert")
# Architectures without a model type of `transformers`; the models written are those of the same arithmetic.
RENAMED = {"minicpm": gguf.MODEL_ARCH.MINICPM, "internlm2": gguf.MODEL_ARCH.INTERNLM2}
# Names that the map of the `gguf` package gives to another tensor of the same layer.
NAMES = {"glm4": {"post_attention_layernorm": "ffn_norm"}}


def write_gguf(
    model: Any,
    path: Path,
    permute: bool = True,
    part_tensors: int = 0,
    more: Callable[[gguf.GGUFWriter], None] | None = None,
    architecture: str = "",
) -> Path:
    """`permute=False` leaves out the reordering of llama's q and k: a wrong file, for negative controls.

    part_tensors: write several files of this many tensors each, and return the path of the first. more: adds metadata and
    tensors; without it the file has no vocabulary. architecture: one of RENAMED, for a granite (minicpm) or a llama.
    """
    config = model.config
    both_ways = getattr(config, "use_bidirectional_attention", False)
    arch = gguf.MODEL_ARCH.GEMMA_EMBEDDING if both_ways else RENAMED.get(architecture, ARCHES[config.model_type])
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=part_tensors)
    writer.add_vocab_size(config.vocab_size)
    if more is None:
        writer.add_tokenizer_model("no_vocab")
        if config.model_type in ("bert", "xlm-roberta"):
            writer.add_token_type_count(config.type_vocab_size)
    else:
        more(writer)
    if config.model_type == "gpt2":
        _gpt2_settings(writer, config)
    elif config.model_type in ENCODERS:
        _encoder_settings(writer, config)
    else:
        _settings(writer, config)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or "pooler." in name:
            continue
        name = _without_prefix(name, config)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        for part, own in NAMES.get(config.model_type, {}).items():
            stored = f"blk.{name.split('.')[2]}.{own}.weight" if part in name else stored
        writer.add_tensor(stored, _laid_out(name, tensor.detach().float(), config, permute))
    _rope_divisors(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-*-of-*.gguf")) if part_tensors else path


def _without_prefix(name: str, config: Any) -> str:
    """The name as llama.cpp's converter looks it up: encoders without their prefix, the last matrix of a head by one name."""
    if config.model_type not in ENCODERS:
        return name
    name = name.removeprefix("bert.").removeprefix("roberta.").removeprefix("model.")
    return name.replace("classifier.", "classifier.out_proj.") if name in ("classifier.weight", "classifier.bias") else name


def _encoder_settings(writer: Any, config: Any) -> None:
    padding = config.pad_token_id + 1 if config.model_type == "xlm-roberta" else 0  # first rows of the table of positions
    writer.add_context_length(config.max_position_embeddings - padding)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_causal_attention(False)
    if config.model_type == "modernbert":
        writer.add_layer_norm_eps(config.norm_eps)
        writer.add_sliding_window(config.local_attention)
        writer.add_sliding_window_pattern(3)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    else:
        writer.add_layer_norm_eps(config.layer_norm_eps)


def _settings(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    _rope_settings(writer, config, head_dim)
    _multipliers(writer, config)
    if getattr(config, "sliding_window", None) is not None:
        # The window of a config that sees both ways is half of the file's.
        writer.add_sliding_window(config.to_dict()["sliding_window"])
    if config.model_type in ("olmo3", "exaone4") and config.sliding_window is not None:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _rope_settings(writer: Any, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    share = 1.0 if rope["rope_type"] == "proportional" else rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head_dim * share))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32))
    if rope.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _multipliers(writer: Any, config: Any) -> None:
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _gpt2_settings(writer: Any, config: Any) -> None:
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def _laid_out(name: str, tensor: torch.Tensor, config: Any, permute: bool) -> np.ndarray:
    if config.model_type in PAIRS and permute and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if config.model_type in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
        tensor = tensor + 1
    if config.model_type == "xlm-roberta" and "position_embeddings" in name:
        tensor = tensor[config.pad_token_id + 1 :]
    if config.model_type == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        tensor = tensor.t()
    return np.ascontiguousarray(tensor.numpy())


def _rope_divisors(writer: Any, config: Any) -> None:
    """Scalings that GGUF has as divisors of the frequencies: Llama 3.1's, and proportional (1e30: a pair without rotation)."""
    rope = getattr(config, "rope_parameters", None) or {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if rope.get("rope_type") == "proportional":
        rotated = int(rope["partial_rotary_factor"] * head_dim // 2)
        pairs = [rope["factor"]] * rotated + [1e30] * (head_dim // 2 - rotated)
        writer.add_tensor("rope_freqs.weight", np.array(pairs, dtype=np.float32))
    if rope.get("rope_type") != "llama3":
        return
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
