"""Hugging Face folders of models: a GGUF file as one of bfloat16 weights; config.json and tokenizer of a folder."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import decoders

from headrace.data.config import ModelConfig, RopeConfig
from headrace.models.registry import describe, read_config
from headrace.startup.opening import Opened
from headrace.text.gguf_vocab import read_gguf
from headrace.text.hf_vocab import TEMPLATES
from headrace.text.tokenizer import Tokenizer
from headrace.text.vocabulary import Vocabulary
from headrace.weights.atomic_file import atomic_write
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import read_part, write_parts
from headrace.weights.parts import plan, stored_as
from headrace.weights.source import WeightError

CONFIG = "config.json"
COPIED = (".json", ".jinja", ".txt", ".model")  # files of a folder that are not weights
POOLING = "1_Pooling"  # subfolder of an embedding model with its pooling settings
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "tie_word_embeddings", "torch_dtype"),
)  # keys of config.json that depend on the model's shape
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def write_folder(source: GGUFFile, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer of a GGUF file. All dequantized weights are in memory at once.

    Raises ValueError for an architecture or a rotary scaling that is not translated.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = read_gguf(source.metadata)
    write_json(folder / CONFIG, hf_config(read_config(source), vocabulary.bos_id, vocabulary.eos_id))
    _write_vocabulary(vocabulary, folder)
    save_file(tensors(source, read_config(source)), folder / "model.safetensors", {"format": "pt"})


def settings_of(opened: Opened, config: ModelConfig) -> dict[str, Any]:
    """config.json for a model with shapes `config`, made from an open one; of a folder its own with changed sizes.

    Raises ValueError as `hf_config` does.
    """
    if isinstance(opened.source, GGUFFile):
        return hf_config(config, opened.tokenizer.bos_id, opened.tokenizer.eos_id)
    plain = replace(config, layers=tuple(replace(layer, rope=RopeConfig()) for layer in config.layers))
    ours, own = hf_config(plain, None, None), dict(opened.source.config)
    for name in ("quantization_config", "layer_types"):
        own.pop(name, None)
    return own | {name: ours[name] for name in SIZES}


def write_words(opened: Opened, folder: Path) -> None:
    """Write the tokenizer and chat template: of a GGUF file converted, of a folder copied.

    Raises WeightError if the tokenizer read back differs.
    """
    if isinstance(opened.source, GGUFFile):
        _write_vocabulary(read_gguf(opened.source.metadata), folder)
    else:
        for file in sorted(opened.path.iterdir()):
            if file.suffix in COPIED and file.is_file() and file.name != CONFIG and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
        if (opened.path / POOLING).is_dir():
            shutil.copytree(opened.path / POOLING, folder / POOLING, dirs_exist_ok=True)
        if (opened.path / TEMPLATES).is_dir():
            (folder / TEMPLATES).mkdir(exist_ok=True)
            for file in sorted((opened.path / TEMPLATES).glob("*.jinja")):
                shutil.copyfile(file, folder / TEMPLATES / file.name)
    if difference := Tokenizer.from_folder(folder).differs(opened.tokenizer):
        raise WeightError(f"{opened.path}: its vocabulary cannot be written as a folder ({difference})")


def _write_vocabulary(vocabulary: Vocabulary, folder: Path) -> None:
    vocabulary.backend.decoder = _decoder(vocabulary)
    vocabulary.backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
    settings: dict[str, Any] = {key: vocabulary.backend.id_to_token(token) for key, token in names.items() if token is not None}
    settings |= {"add_bos_token": bool(vocabulary.prefix), "add_eos_token": bool(vocabulary.suffix)}
    if templates := vocabulary.templates:
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        settings["chat_template"] = templates["default"] if list(templates) == ["default"] else listed
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})


def _decoder(vocabulary: Vocabulary) -> decoders.Decoder:
    """Decoder for tokenizer.json; Headrace decodes by itself, other engines need it in the file."""
    if vocabulary.spelling == "bytes":
        return decoders.ByteLevel()
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.strip_space else []
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def tensors(source: GGUFFile, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every tensor by Hugging Face names; norms stay float32."""
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
    """config.json of a Llama-like decoder, with rotary settings in the old and the new form. Raises ValueError if not
    translated.
    """
    if config.architecture not in CLASSES:
        raise ValueError(f"{config.architecture} is not translated for other engines; known are {', '.join(CLASSES)}")
    layer = config.sharing(1).each_layer
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
        **({"kv_share": config.kv_share} if config.kv_share > 1 else {}),
    }


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write indented JSON atomically."""
    with atomic_write(path) as part:
        part.write_text(json.dumps(values, indent=2))
