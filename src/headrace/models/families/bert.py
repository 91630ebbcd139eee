"""BERT, MiniLM and their like: encoders with learned positions."""

from headrace.data.config import ModelConfig
from headrace.models import hf
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader
from headrace.weights.origins import NameMap, origins

NAMES = {
    "tokens.weight": "embeddings.word_embeddings.weight",
    "positions.weight": "embeddings.position_embeddings.weight",
    "types.weight": "embeddings.token_type_embeddings.weight",
    "embed_norm": "embeddings.LayerNorm",
    "layers.{i}.qkv.q": "encoder.layer.{i}.attention.self.query",
    "layers.{i}.qkv.k": "encoder.layer.{i}.attention.self.key",
    "layers.{i}.qkv.v": "encoder.layer.{i}.attention.self.value",
    "layers.{i}.out": "encoder.layer.{i}.attention.output.dense",
    "layers.{i}.attn_norm": "encoder.layer.{i}.attention.output.LayerNorm",
    "layers.{i}.up": "encoder.layer.{i}.intermediate.dense",
    "layers.{i}.down": "encoder.layer.{i}.output.dense",
    "layers.{i}.mlp_norm": "encoder.layer.{i}.output.LayerNorm",
}
TRAINED_WITH = (r"pooler\..*", r"cls\..*", r"embeddings\.position_ids")  # and not needed for embeddings


def from_hf(read: Reader) -> ModelConfig:
    if read.get("position_embedding_type", "absolute") != "absolute":
        raise read.error("asks for relative positions, which bert is not built with; use a checkpoint with absolute ones")
    hf.require_activation(read, "gelu")
    return ModelConfig(
        architecture="bert",
        vocab_size=read.size("vocab_size"),
        hidden_size=read.size("hidden_size"),
        layers=hf.even_layers(read, "hidden_size", "num_attention_heads", "num_hidden_layers", read.size("intermediate_size")),
        max_position=read.size("max_position_embeddings"),
        norm_eps=read.number("layer_norm_eps", 1e-12),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        encoder=True,
        token_types=read.size("type_vocab_size", 2),
    )


FAMILY = Family(
    architecture="bert",
    shape="bert",
    hf=FileFormat(from_hf, NameMap(origins(NAMES), "bert.", TRAINED_WITH)),
    gguf="BERT is read from safetensors; take the folder the model is published as",
)
