"""GLM-4 (0414): norms around both branches, gate and up in one tensor, half of each head rotated."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import gemma3, llama
from headrace.models.families.phi3 import GGUF_GATE_UP, HF_GATE_UP
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader
from headrace.weights.origins import NameMap, laid_out, origins

POST_NORMS = {
    "layers.{i}.attn_post_norm": "layers.{i}.post_self_attn_layernorm",
    "layers.{i}.mlp_post_norm": "layers.{i}.post_mlp_layernorm",
}
HF_NAMES = llama.HF_NAMES | origins(POST_NORMS) | HF_GATE_UP
GGUF_NAMES = llama.GGUF_NAMES | origins(gemma3.GGUF_POST_NORMS) | GGUF_GATE_UP


def _glm4(config: ModelConfig) -> ModelConfig:
    return replace(config, out_bias=False, activation="silu")


def from_hf(read: Reader) -> ModelConfig:
    share = {"partial_rotary_factor": read.get("partial_rotary_factor", 0.5)}
    return _glm4(hf.decoder(read, rotary=share | dict(hf.rope_settings(read))))


def from_gguf(read: Reader) -> ModelConfig:
    return _glm4(gguf.decoder(read))


# Both kinds of files have the rotary pairs of q and k as neighbours.
FAMILY = Family(
    architecture="glm4",
    shape="gemma3",
    hf=FileFormat(from_hf, NameMap(laid_out(HF_NAMES, "rope_pairs", *llama.PAIRED), "model.", llama.INV_FREQ)),
    gguf=FileFormat(from_gguf, NameMap(laid_out(GGUF_NAMES, "rope_pairs", *llama.PAIRED), ignored=llama.DIVISORS)),
)
