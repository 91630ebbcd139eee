"""Gemma 2: Gemma 3 without norms of q and k, with softcaps; every second layer slides."""

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import gemma3
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader, windowed

PERIOD = 2
GGUF_27B_LAYERS = 46  # the one size whose queries are scaled by hidden / heads, which GGUF files do not say


def from_hf(read: Reader) -> ModelConfig:
    config = hf.decoder(read, "gelu_pytorch_tanh", tied=True)
    windowed_config = windowed(config, hf.windows(read, lambda layer: (layer + 1) % PERIOD != 0))
    return gemma3.scaled(windowed_config, read.number("query_pre_attn_scalar") ** -0.5)


def from_gguf(read: Reader) -> ModelConfig:
    config = gguf.decoder(read)
    layer = config.each_layer
    width = config.hidden_size // layer.heads if config.num_layers == GGUF_27B_LAYERS else layer.head_dim
    return gemma3.scaled(windowed(config, gguf.windows(read, config, PERIOD)), float(width) ** -0.5)


FAMILY = Family(
    architecture="gemma2", shape="gemma3", hf=FileFormat(from_hf, gemma3.HF), gguf=FileFormat(from_gguf, gemma3.GGUF)
)
