"""BERT, MiniLM, BGE: encoders with learned positions. GGUF files of XLM-R have this architecture, too."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
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
GGUF_NAMES = {
    "tokens.weight": "token_embd.weight",
    "positions.weight": "position_embd.weight",
    "types.weight": "token_types.weight",
    "embed_norm": "token_embd_norm",
    "layers.{i}.qkv.q": "blk.{i}.attn_q",
    "layers.{i}.qkv.k": "blk.{i}.attn_k",
    "layers.{i}.qkv.v": "blk.{i}.attn_v",
    "layers.{i}.out": "blk.{i}.attn_output",
    "layers.{i}.attn_norm": "blk.{i}.attn_output_norm",
    "layers.{i}.up": "blk.{i}.ffn_up",
    "layers.{i}.down": "blk.{i}.ffn_down",
    "layers.{i}.mlp_norm": "blk.{i}.layer_output_norm",
}
# Tensors that embeddings do not need; `weights.ranking` reads the heads of rerankers.
HEADS = (r"pooler\..*", r"cls\..*", r"classifier\..*", r"lm_head\..*", r"embeddings\.position_ids")
GGUF_HEADS = (r"cls(\.output)?\.(weight|bias)",)


def from_hf(read: Reader) -> ModelConfig:
    if read.get("position_embedding_type", "absolute") != "absolute":
        raise read.error(
            f"asks for relative positions, which {read.architecture} is not built with; use a checkpoint with absolute ones"
        )
    hf.require_activation(read, "gelu")
    return ModelConfig(
        architecture=read.architecture,
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


def from_gguf(read: Reader) -> ModelConfig:
    config = gguf.decoder(read, "attention.layer_norm_epsilon", rotary=False)
    types, positions = (read.source.info(f"{name}.weight").shape[0] for name in ("token_types", "position_embd"))
    return replace(config, encoder=True, token_types=types, max_position=positions)


FAMILY = Family(
    architecture="bert",
    shape="bert",
    hf=FileFormat(from_hf, NameMap(origins(NAMES), "bert.", HEADS)),
    gguf=FileFormat(from_gguf, NameMap(origins(GGUF_NAMES), ignored=GGUF_HEADS)),
)
