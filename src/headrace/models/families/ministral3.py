"""Ministral 3 (text): mistral with YaRN, and queries that grow with the position."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader, windowed


def _growing(config: ModelConfig, growth: float) -> ModelConfig:
    layers = (replace(layer, rope=layer.rope and replace(layer.rope, growth=growth)) for layer in config.layers)
    return replace(config, layers=tuple(layers))


def from_hf(read: Reader) -> ModelConfig:
    config = windowed(hf.decoder(read, theta=1000000.0), hf.windows(read, lambda layer: True))
    settings = replace(read, values=hf.rope_settings(read))
    return _growing(config, settings.number("llama_4_scaling_beta") if settings.get("llama_4_scaling_beta") else 0.0)


def from_gguf(read: Reader) -> ModelConfig:
    scale = read.number("attention.temperature_scale") if read.get("attention.temperature_scale") else 0.0
    return _growing(gguf.decoder(read), scale)


FAMILY = Family(
    architecture="ministral3",
    shape="llama",
    hf=FileFormat(from_hf, llama.HF),
    gguf=FileFormat(from_gguf, llama.GGUF_PAIRED),
    gguf_name="mistral3",
)
