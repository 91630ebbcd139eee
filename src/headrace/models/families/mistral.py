"""Mistral: llama with a sliding window."""

from headrace.data.config import ModelConfig
from headrace.models import hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader, windowed


def from_hf(read: Reader) -> ModelConfig:
    return windowed(hf.with_shared_kv(read, hf.decoder(read)), hf.windows(read, lambda layer: True))


FAMILY = Family(
    architecture="mistral",
    shape="llama",
    hf=FileFormat(from_hf, llama.HF),
    gguf="GGUF files of Mistral say 'llama'; convert the model again, with convert_hf_to_gguf.py of llama.cpp",
)
