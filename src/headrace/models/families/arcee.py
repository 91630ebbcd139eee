"""Arcee (AFM): llama with an MLP of two matrices and squared ReLU."""

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader
from headrace.weights.origins import NameMap, laid_out, origins

HF_NAMES = llama.HF_NAMES | origins({"layers.{i}.up": "layers.{i}.mlp.up_proj"})
GGUF_NAMES = llama.GGUF_NAMES | origins({"layers.{i}.up": "blk.{i}.ffn_up"})


def from_hf(read: Reader) -> ModelConfig:
    return hf.decoder(read, "relu2")


FAMILY = Family(
    architecture="arcee",
    shape="arcee",
    hf=FileFormat(from_hf, NameMap(HF_NAMES, "model.", llama.INV_FREQ)),
    gguf=FileFormat(gguf.decoder, NameMap(laid_out(GGUF_NAMES, "rope_pairs", *llama.PAIRED), ignored=llama.DIVISORS)),
)
