"""MPNet (all-mpnet-base-v2): RoBERTa without token types, with T5's bias by distance."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models.families import bert, roberta
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader
from headrace.weights.origins import NameMap, laid_out, origins

DISTANCE = 128  # config.json does not have it
ATTENTION = {f"layers.{{i}}.qkv.{part}": f"encoder.layer.{{i}}.attention.attn.{part}" for part in "qkv"}
OTHERS = {
    "layers.{i}.out": "encoder.layer.{i}.attention.attn.o",
    "layers.{i}.attn_norm": "encoder.layer.{i}.attention.LayerNorm",
    "relative.weight": "encoder.relative_attention_bias.weight",
}
NAMES = laid_out(origins(bert.NAMES | ATTENTION | OTHERS), "padded", "positions.weight")


def from_hf(read: Reader) -> ModelConfig:
    config = roberta.without_padding(read, bert.from_hf(read))
    buckets = read.size("relative_attention_num_buckets", 32, least=4)
    return replace(config, token_types=0, buckets=buckets, bucket_distance=DISTANCE)


FAMILY = Family(
    architecture="mpnet",
    shape="bert",
    hf=FileFormat(from_hf, NameMap(NAMES, "mpnet.", bert.HEADS)),
    gguf="MPNet is read from safetensors; take the folder the model is published as",
)
