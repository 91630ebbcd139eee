"""Qwen3 (dense): llama with an RMSNorm on every query and key head, heads wider than hidden / heads, and Qwen2's windows."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama, qwen2
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader, windowed


def from_hf(read: Reader) -> ModelConfig:
    return replace(windowed(hf.with_shared_kv(read, hf.decoder(read)), qwen2.windows(read)), qk_norm=True, mlp_bias=False)


def from_gguf(read: Reader) -> ModelConfig:
    return replace(gguf.decoder(read), qk_norm=True, mlp_bias=False)


FAMILY = Family(architecture="qwen3", shape="llama", hf=FileFormat(from_hf, llama.HF), gguf=FileFormat(from_gguf, llama.GGUF))
