"""An architecture by numbers: llama whose embeddings are multiplied, as its config.json says."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader


def from_hf(read: Reader) -> ModelConfig:
    return replace(hf.decoder(read), embed_scale=read.number("embedding_multiplier"))


FAMILY = Family("loud_llama", shape="llama", hf=FileFormat(from_hf, llama.HF), gguf="loud llamas are read from safetensors")
