"""InternLM 2 and 2.5: llama with q, k and v in one tensor, by K/V head, and names of its own."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader
from headrace.weights.origins import NameMap, laid_out, origins, stacked

NAMES = {
    "tokens.weight": "tok_embeddings.weight",
    "norm": "norm",
    "output": "output",
    "layers.{i}.attn_norm": "layers.{i}.attention_norm",
    "layers.{i}.out": "layers.{i}.attention.wo",
    "layers.{i}.mlp_norm": "layers.{i}.ffn_norm",
    "layers.{i}.gate_up.gate": "layers.{i}.feed_forward.w1",
    "layers.{i}.gate_up.up": "layers.{i}.feed_forward.w3",
    "layers.{i}.down": "layers.{i}.feed_forward.w2",
}
QKV = laid_out(stacked("layers.{i}.qkv", "qkv", "layers.{i}.attention.wqkv"), "by_group", "weight", "bias")


def from_hf(read: Reader) -> ModelConfig:
    bias = bool(read.get("bias", False))
    return replace(hf.decoder(read), qkv_bias=bias, out_bias=bias)


FAMILY = Family(
    architecture="internlm2",
    shape="llama",
    hf=FileFormat(from_hf, NameMap(origins(NAMES) | QKV, "model.", llama.INV_FREQ)),
    gguf=FileFormat(gguf.decoder, llama.GGUF_PAIRED),
)
