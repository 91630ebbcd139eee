"""GPT-2: learned positions, biases everywhere, q, k and v stored as one."""

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader
from headrace.weights.origins import NameMap, laid_out, origins, stacked

HF_NAMES = {
    "tokens.weight": "wte.weight",
    "positions.weight": "wpe.weight",
    "norm": "ln_f",
    "output": "lm_head",
    "layers.{i}.attn_norm": "h.{i}.ln_1",
    "layers.{i}.out": "h.{i}.attn.c_proj",
    "layers.{i}.mlp_norm": "h.{i}.ln_2",
    "layers.{i}.up": "h.{i}.mlp.c_fc",
    "layers.{i}.down": "h.{i}.mlp.c_proj",
}
GGUF_NAMES = {"positions.weight": "position_embd.weight", "layers.{i}.up": "blk.{i}.ffn_up"}
TRANSPOSED = tuple(f".{name}.weight" for name in ("q", "k", "v", "out", "up", "down"))
QKV = "layers.{i}.qkv"
CAUSAL_MASK = (r"h\.\d+\.attn\.(masked_)?bias",)  # buffers that old checkpoints saved


def from_hf(read: Reader) -> ModelConfig:
    hf.require_activation(read, "gelu_new", "gelu_pytorch_tanh")
    hidden = read.size("n_embd")
    return ModelConfig(
        architecture="gpt2",
        vocab_size=read.size("vocab_size"),
        hidden_size=hidden,
        layers=hf.even_layers(read, "n_embd", "n_head", "n_layer", read.size("n_inner", 4 * hidden)),
        max_position=read.size("n_positions"),
        norm_eps=read.number("layer_norm_epsilon"),
        tied_head=bool(read.get("tie_word_embeddings", True)),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )


def from_gguf(read: Reader) -> ModelConfig:
    return gguf.decoder(read, eps="attention.layer_norm_epsilon", rotary=False)


FAMILY = Family(
    architecture="gpt2",
    shape="gpt2",
    hf=FileFormat(
        from_hf,
        NameMap(
            laid_out(origins(HF_NAMES) | stacked(QKV, "qkv", "h.{i}.attn.c_attn"), "transposed", *TRANSPOSED),
            "transformer.",
            CAUSAL_MASK,
        ),
    ),
    gguf=FileFormat(from_gguf, NameMap(llama.GGUF_NAMES | origins(GGUF_NAMES) | stacked(QKV, "qkv", "blk.{i}.attn_qkv"))),
)
