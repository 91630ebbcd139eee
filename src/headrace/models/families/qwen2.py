"""Qwen2 and Qwen2.5: llama with biases on q, k and v and on nothing else; later layers may have a window."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader, windowed


def windows(read: Reader) -> list[int | None]:
    layers = read.size("num_hidden_layers")
    if not read.get("use_sliding_window", False):
        return [None] * layers
    first = read.get("max_window_layers", layers)
    return hf.windows(read, lambda layer: bool(layer >= first))


def _biased(config: ModelConfig) -> ModelConfig:
    return replace(config, qkv_bias=True, out_bias=False, mlp_bias=False)


def from_hf(read: Reader) -> ModelConfig:
    return _biased(windowed(hf.with_shared_kv(read, hf.decoder(read)), windows(read)))


def from_gguf(read: Reader) -> ModelConfig:
    return _biased(gguf.decoder(read))


FAMILY = Family(architecture="qwen2", shape="llama", hf=FileFormat(from_hf, llama.HF), gguf=FileFormat(from_gguf, llama.GGUF))
