"""ERNIE 4.5 (dense): llama whose q and k have their rotary pairs as neighbours in both kinds of files."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader
from headrace.weights.origins import NameMap, laid_out


def from_hf(read: Reader) -> ModelConfig:
    bias = bool(read.get("use_bias", False))
    return replace(hf.decoder(read, tied=True, theta=500000.0), qkv_bias=bias, out_bias=bias, mlp_bias=bias)


FAMILY = Family(
    architecture="ernie4_5",
    shape="llama",
    hf=FileFormat(from_hf, NameMap(laid_out(llama.HF_NAMES, "rope_pairs", *llama.PAIRED), "model.", llama.INV_FREQ)),
    gguf=FileFormat(gguf.decoder, llama.GGUF_PAIRED),
)
