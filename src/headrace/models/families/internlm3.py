"""InternLM 3: llama with two settings for its biases."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader


def from_hf(read: Reader) -> ModelConfig:
    qkv, others = (
        bool(read.get(new, read.get(old, False))) for new, old in (("qkv_bias", "attention_bias"), ("bias", "mlp_bias"))
    )
    return replace(hf.decoder(read), qkv_bias=qkv, out_bias=others, mlp_bias=others)


FAMILY = Family(
    architecture="internlm3",
    shape="llama",
    hf=FileFormat(from_hf, llama.HF),
    gguf="GGUF files of InternLM 3 say 'llama'; convert the model again, with convert_hf_to_gguf.py of llama.cpp",
)
