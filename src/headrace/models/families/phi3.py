"""Phi-3, Phi-4 and Phi-4-mini: llama with q, k and v in one tensor, gate and up in another, and LongRoPE."""

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader, windowed
from headrace.weights.origins import NameMap, stacked

QKV, GATE_UP = ("layers.{i}.qkv", "qkv"), ("layers.{i}.gate_up", ("gate", "up"))
HF_GATE_UP = stacked(*GATE_UP, "layers.{i}.mlp.gate_up_proj")
GGUF_GATE_UP = stacked(*GATE_UP, "blk.{i}.ffn_up")
HF_NAMES = llama.HF_NAMES | stacked(*QKV, "layers.{i}.self_attn.qkv_proj") | HF_GATE_UP
GGUF_NAMES = llama.GGUF_NAMES | stacked(*QKV, "blk.{i}.attn_qkv") | GGUF_GATE_UP
# LongRoPE's divisors are no parameters: models.gguf has read them.
DIVISORS = (*llama.DIVISORS, r"rope_factors_(long|short)\.weight")
OLD_LONGROPE = ("su", "yarn")  # what Phi-3's first files call it


def from_hf(read: Reader) -> ModelConfig:
    settings = dict(hf.rope_settings(read))
    if (settings.get("rope_type") or settings.get("type")) in OLD_LONGROPE:
        settings |= {"rope_type": "longrope"}
    return windowed(hf.decoder(read, rotary=settings), hf.windows(read, lambda layer: True))


FAMILY = Family(
    architecture="phi3",
    shape="llama",
    hf=FileFormat(from_hf, NameMap(HF_NAMES, "model.", llama.INV_FREQ)),
    gguf=FileFormat(gguf.decoder, NameMap(GGUF_NAMES, ignored=DIVISORS)),
)
