"""OLMo 2: llama's branches with norms after them alone; all queries of a row are normed as one vector, and its keys."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader, windowed
from headrace.weights.origins import NameMap, origins

PERIOD = 4  # of OLMo 3: every fourth layer is full, where the file does not say
POST_NORMS = {
    "layers.{i}.attn_post_norm": "layers.{i}.post_attention_layernorm",
    "layers.{i}.mlp_post_norm": "layers.{i}.post_feedforward_layernorm",
}
GGUF_POST_NORMS = {
    "layers.{i}.attn_post_norm": "blk.{i}.post_attention_norm",
    "layers.{i}.mlp_post_norm": "blk.{i}.post_ffw_norm",
}
HF = NameMap(llama.HF_NAMES | origins(POST_NORMS), "model.", llama.INV_FREQ)
GGUF = NameMap(llama.GGUF_NAMES | origins(GGUF_POST_NORMS), ignored=llama.DIVISORS)


def from_hf(read: Reader) -> ModelConfig:
    return replace(hf.decoder(read), wide_qk_norm=True)


def from_gguf(read: Reader) -> ModelConfig:
    """OLMo 2, or OLMo 3 if the file has a window: sliding layers have no scaling, and the file's factor is YaRN's amplitude."""
    config = replace(gguf.decoder(read), wide_qk_norm=True)
    rope = config.layers[0].rope
    if config.layers[0].window is None or rope is None:
        return config
    scaled = replace(rope, amplitude=read.number("rope.scaling.attn_factor", rope.amplitude))
    full = replace(config, layers=tuple(replace(layer, rope=scaled) for layer in config.layers))
    local = replace(rope, scaling="none", amplitude=1.0)
    return windowed(full, gguf.windows(read, config, PERIOD), local)


FAMILY = Family(architecture="olmo2", shape="olmo2", hf=FileFormat(from_hf, HF), gguf=FileFormat(from_gguf, GGUF))
