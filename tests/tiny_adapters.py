"""Tiny LoRA adapters as peft writes them, and as GGUF files, with random matrices."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, base: Any, seed: int, targets: Sequence[str] = ALL, rank: int = 4, **settings: Any) -> Path:
    """Write a folder of peft for a model of `transformers`. settings: keys of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, tensors = torch.Generator().manual_seed(seed), {}
    for name, value in base.named_parameters():
        module = name.removesuffix(".weight")
        if value.dim() == 2 and module.rpartition(".")[2] in targets:
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, value.shape[1], generator=rng) * value.shape[1] ** -0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(value.shape[0], rank, generator=rng)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(targets), "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "adapter_model.safetensors"))


@torch.no_grad()
def add_to(model: Any, folder: Path, times: float = 1.0) -> None:
    """Add an adapter to the weights of a model of `transformers`, by the formula W + scale B A. times: -1 takes it away."""
    settings, tensors = json.loads((folder / "adapter_config.json").read_text()), tensors_of(folder)
    rank = settings["r"]
    scale = settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    parameters = dict(model.named_parameters())
    for key in [key for key in tensors if key.endswith("lora_A.weight")]:
        weight = parameters[key.removeprefix("base_model.model.").replace("lora_A.", "")]
        down, up = tensors[key].to(weight.dtype), tensors[key.replace("lora_A", "lora_B")].to(weight.dtype)
        weight += times * scale * (up @ down)


def write_gguf_adapter(path: Path, folder: Path, arch: gguf.MODEL_ARCH, layers: int, heads: dict[str, int]) -> Path:
    """The adapter of a folder as llama.cpp's converter writes it. heads: of q and k, whose rows lie as rotary pairs."""
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", json.loads((folder / "adapter_config.json").read_text())["lora_alpha"])
    names = gguf.get_tensor_name_map(arch, layers)
    for key, value in tensors_of(folder).items():
        module, side = key.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        count = heads.get(module.rpartition(".")[2])
        if side == "B" and count:
            value = value.view(count, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        stored = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        writer.add_tensor(f"{stored}.lora_{side.lower()}", np.ascontiguousarray(value.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
