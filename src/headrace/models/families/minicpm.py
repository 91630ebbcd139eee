"""MiniCPM (dense): llama with Granite's multipliers, given as a depth scale and a base width."""

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama
from headrace.models.families.granite import multiplied
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader

# MiniCPM's own numbers, for GGUF files without them.
EMBEDDINGS, DEPTH, BASE_WIDTH = 12.0, 1.4, 256


def from_hf(read: Reader) -> ModelConfig:
    config = hf.decoder(read)
    branches = read.number("scale_depth", 1.0) / config.num_layers**0.5 if read.get("scale_depth") else 1.0
    logits = read.size("dim_model_base", config.hidden_size) / config.hidden_size
    return multiplied(config, read.number("scale_emb", 1.0), branches, logits)


def from_gguf(read: Reader) -> ModelConfig:
    config = gguf.decoder(read)
    embeddings = read.number("embedding_scale", EMBEDDINGS)
    branches = read.number("residual_scale", DEPTH / config.num_layers**0.5)
    return multiplied(config, embeddings, branches, 1 / read.number("logit_scale", config.hidden_size / BASE_WIDTH))


FAMILY = Family(
    architecture="minicpm", shape="llama", hf=FileFormat(from_hf, llama.HF), gguf=FileFormat(from_gguf, llama.GGUF_PAIRED)
)
