"""A GGUF model as a Hugging Face folder of bfloat16 weights, for engines that read nothing else."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import decoders

from headrace.data.config import ModelConfig
from headrace.models.registry import describe, read_config
from headrace.text.gguf_vocab import read_gguf
from headrace.text.vocabulary import Vocabulary
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import read_part, write_parts
from headrace.weights.parts import plan, stored_as

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def write_folder(source: GGUFFile, folder: Path) -> None:
    """config.json, model.safetensors, tokenizer.json and its settings into `folder`; dequantised weights, all in memory once.

    Raises ValueError for an architecture or a rotary scaling that this does not translate.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(source, folder)
    save_file(tensors(source, read_config(source)), folder / "model.safetensors", {"format": "pt"})


def write_settings(source: GGUFFile, folder: Path) -> None:
    """What such a folder has besides weights. Raises ValueError as `write_folder` does."""
    config = read_config(source)
    vocabulary = read_gguf(source.metadata)
    _write_json(folder / "config.json", hf_config(config, vocabulary.bos_id, vocabulary.eos_id))
    vocabulary.backend.decoder = _decoder(vocabulary)
    vocabulary.backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
    said: dict[str, Any] = {key: vocabulary.backend.id_to_token(token) for key, token in names.items() if token is not None}
    said |= {"add_bos_token": bool(vocabulary.prefix), "add_eos_token": bool(vocabulary.suffix)}
    if vocabulary.chat_template is not None:
        said["chat_template"] = vocabulary.chat_template
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **said})


def _decoder(vocabulary: Vocabulary) -> decoders.Decoder:
    """How tokens become text again, which we do ourselves and others leave to the file."""
    if vocabulary.spelling == "bytes":
        return decoders.ByteLevel()
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.strip_space else []
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def tensors(source: GGUFFile, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every stored tensor as Hugging Face has it; norms stay float32."""
    model = describe(config)
    specs = {f"{path}.{field}": spec for path, holder in model.holders() for field, spec in holder.params().items()}
    read = {
        part.target: (part, torch.float32 if specs[key].exact else torch.bfloat16)
        for key, parts in plan(model, source).items()
        for part in parts
    }

    def values(target: str) -> torch.Tensor:
        part, dtype = read[target]
        return read_part(part, source, dtype)

    return {name: write_parts(parts, values) for name, parts in stored_as(model, "safetensors").items()}


def hf_config(config: ModelConfig, bos: int | None, eos: int | None) -> dict[str, Any]:
    """The config.json of a decoder of Llama's family, with rotary settings in the old form and the new."""
    if config.architecture not in CLASSES:
        raise ValueError(f"{config.architecture} is not translated for other engines; known are {', '.join(CLASSES)}")
    layer = config.each_layer
    rope = layer.rope
    if rope is None or rope.scaling not in ("none", "linear") or rope.dim is not None or layer.window:
        raise ValueError("rotary scaling other than linear, partial rotary heads and sliding windows are not translated")
    scaling = {"rope_type": "linear", "factor": rope.factor} if rope.scaling == "linear" else {"rope_type": "default"}
    return {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": layer.ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling if rope.scaling == "linear" else None,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "sliding_window": None,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": bos,
        "eos_token_id": eos,
        "use_cache": True,
    }


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2))
