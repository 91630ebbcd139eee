"""Granite 3 and 4.1 (dense): llama with multipliers of the embeddings, the attention scores, the branches and the logits."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader


def multiplied(config: ModelConfig, embeddings: float, branches: float, logits: float) -> ModelConfig:
    """The config of a model whose embeddings, branches (attention, MLP) and logits are multiplied by these numbers.

    Rows of the model are the file's divided by `branches`, so that branches join unscaled: the embeddings carry the quotient,
    and a norm of smaller rows is the same with an epsilon that is smaller by the square.
    """
    eps = config.norm_eps / branches**2
    return replace(config, embed_scale=embeddings / branches, norm_eps=eps, head_scale=logits)


def from_hf(read: Reader) -> ModelConfig:
    config = replace(hf.decoder(read), attn_scale=read.number("attention_multiplier", 1.0))
    embeddings, branches = read.number("embedding_multiplier", 1.0), read.number("residual_multiplier", 1.0)
    return multiplied(config, embeddings, branches, 1 / read.number("logits_scaling", 1.0))


def from_gguf(read: Reader) -> ModelConfig:
    config = gguf.decoder(read)
    scale = read.number("attention.scale", config.each_layer.head_dim**-0.5)
    embeddings, branches = read.number("embedding_scale", 1.0), read.number("residual_scale", 1.0)
    return multiplied(replace(config, attn_scale=scale), embeddings, branches, 1 / read.number("logit_scale", 1.0))


FAMILY = Family(
    architecture="granite",
    shape="llama",
    hf=FileFormat(from_hf, llama.HF),
    gguf=FileFormat(from_gguf, llama.GGUF_PAIRED),
)
