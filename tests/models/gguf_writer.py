"""Writes a transformers model as a GGUF file with the `gguf` package: its name maps and its keys, independent of ours.

The layout rules are those of GGUF: llama's q and k rows as rotary neighbours, gemma's norms as 1 + w, GPT-2's linears
[out, in]. The file has no vocabulary.
"""

import math
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
}


def write_gguf(model: Any, path: Path, permute: bool = True) -> Path:
    """`permute=False` leaves out the reordering of llama's q and k: a wrong file, for negative controls."""
    config = model.config
    arch = ARCHES[config.model_type]
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    if config.model_type == "gpt2":
        _gpt2_settings(writer, config)
    else:
        _settings(writer, config)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, _laid_out(name, tensor.detach().float(), config, permute))
    _rope_divisors(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _gpt2_settings(writer: Any, config: Any) -> None:
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def _laid_out(name: str, tensor: torch.Tensor, config: Any, permute: bool) -> np.ndarray:
    if config.model_type in ("llama", "mistral") and permute and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        tensor = tensor + 1
    if config.model_type == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        tensor = tensor.t()
    return np.ascontiguousarray(tensor.numpy())


def _rope_divisors(writer: Any, config: Any) -> None:
    """Llama 3.1's scaling, as GGUF has it: what each frequency is divided by."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / config.head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
