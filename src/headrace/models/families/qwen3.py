"""Qwen3 (dense): llama with an RMSNorm on every query and key head, heads wider than hidden / heads, and Qwen2's windows."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama, qwen2
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader, windowed
from headrace.weights.origins import NameMap

# Heads of rerankers, which `weights.ranking` reads.
HEADS, GGUF_HEADS = (r"score\.weight",), (r"cls\.output\.(weight|bias)",)


def from_hf(read: Reader) -> ModelConfig:
    config = replace(windowed(hf.with_shared_kv(read, hf.decoder(read)), qwen2.windows(read)), qk_norm=True, mlp_bias=False)
    names = read.source.names()
    # Embedding models and rerankers may be saved without an output matrix.
    alone = "lm_head.weight" not in names and ("embed_tokens.weight" in names or "score.weight" in names)
    return replace(config, tied_head=config.tied_head or alone)


def from_gguf(read: Reader) -> ModelConfig:
    return replace(gguf.decoder(read), qk_norm=True, mlp_bias=False)


FAMILY = Family(
    architecture="qwen3",
    shape="llama",
    hf=FileFormat(from_hf, NameMap(llama.HF_NAMES, "model.", llama.INV_FREQ + HEADS)),
    gguf=FileFormat(from_gguf, NameMap(llama.GGUF_NAMES, ignored=llama.DIVISORS + GGUF_HEADS)),
)
