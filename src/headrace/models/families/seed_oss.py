"""Seed-OSS: llama with wide heads and biases on q, k and v."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader
from headrace.weights.origins import NameMap, origins

# In GGUF files the norm before the MLP has the name that others give to a norm after attention.
GGUF_NAMES = llama.GGUF_NAMES | origins({"layers.{i}.mlp_norm": "blk.{i}.post_attention_norm"})


def from_hf(read: Reader) -> ModelConfig:
    return replace(hf.decoder(read), out_bias=bool(read.get("attention_out_bias", False)))


FAMILY = Family(
    architecture="seed_oss",
    shape="llama",
    hf=FileFormat(from_hf, llama.HF),
    gguf=FileFormat(gguf.decoder, NameMap(GGUF_NAMES, ignored=llama.DIVISORS)),
)
