"""OLMo 3: OLMo 2 with three sliding layers to each full one; YaRN scales the full ones alone."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import hf
from headrace.models.families import olmo2
from headrace.models.families.olmo2 import PERIOD
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader, windowed

THETA = 500000.0


def from_hf(read: Reader) -> ModelConfig:
    new = read.get("rope_parameters") or {}
    full = new.get("full_attention") or new or hf.rope_settings(read)
    sliding = new.get("sliding_attention") or {"rope_theta": full.get("rope_theta")}
    config = replace(hf.decoder(read, rotary=full, theta=THETA), wide_qk_norm=True)
    local = hf.rope(read, sliding, config.each_layer.head_dim, THETA)
    return windowed(config, hf.windows(read, lambda layer: (layer + 1) % PERIOD != 0), local)


FAMILY = Family(
    architecture="olmo3",
    shape="olmo2",
    hf=FileFormat(from_hf, olmo2.HF),
    gguf="GGUF files of OLMo 3 say 'olmo2'; convert the model again, with convert_hf_to_gguf.py of llama.cpp",
)
