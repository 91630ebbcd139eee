"""Llama 2 and 3, SmolLM2, and the names that most decoders share."""

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader
from headrace.weights.origins import NameMap, laid_out, origins

HF_NAMES = origins(
    {
        "tokens.weight": "embed_tokens.weight",
        "norm": "norm",
        "output": "lm_head",
        "layers.{i}.attn_norm": "layers.{i}.input_layernorm",
        "layers.{i}.qkv.q": "layers.{i}.self_attn.q_proj",
        "layers.{i}.qkv.k": "layers.{i}.self_attn.k_proj",
        "layers.{i}.qkv.v": "layers.{i}.self_attn.v_proj",
        "layers.{i}.q_norm": "layers.{i}.self_attn.q_norm",
        "layers.{i}.k_norm": "layers.{i}.self_attn.k_norm",
        "layers.{i}.out": "layers.{i}.self_attn.o_proj",
        "layers.{i}.mlp_norm": "layers.{i}.post_attention_layernorm",
        "layers.{i}.gate_up.gate": "layers.{i}.mlp.gate_proj",
        "layers.{i}.gate_up.up": "layers.{i}.mlp.up_proj",
        "layers.{i}.down": "layers.{i}.mlp.down_proj",
    }
)
GGUF_NAMES = origins(
    {
        "tokens.weight": "token_embd.weight",
        "norm": "output_norm",
        "output": "output",
        "layers.{i}.attn_norm": "blk.{i}.attn_norm",
        "layers.{i}.qkv.q": "blk.{i}.attn_q",
        "layers.{i}.qkv.k": "blk.{i}.attn_k",
        "layers.{i}.qkv.v": "blk.{i}.attn_v",
        "layers.{i}.q_norm": "blk.{i}.attn_q_norm",
        "layers.{i}.k_norm": "blk.{i}.attn_k_norm",
        "layers.{i}.out": "blk.{i}.attn_output",
        "layers.{i}.mlp_norm": "blk.{i}.ffn_norm",
        "layers.{i}.gate_up.gate": "blk.{i}.ffn_gate",
        "layers.{i}.gate_up.up": "blk.{i}.ffn_up",
        "layers.{i}.down": "blk.{i}.ffn_down",
    }
)
INV_FREQ = (r"(.*\.)?rotary_emb\.inv_freq",)  # a buffer that old checkpoints saved
DIVISORS = (r"rope_freqs\.weight",)  # no parameter: models.gguf has read it into RopeConfig.divisors
HF = NameMap(HF_NAMES, "model.", INV_FREQ)
GGUF = NameMap(GGUF_NAMES, ignored=DIVISORS)
PAIRED = ("qkv.q.weight", "qkv.k.weight", "qkv.q.bias", "qkv.k.bias")
GGUF_PAIRED = NameMap(laid_out(GGUF_NAMES, "rope_pairs", *PAIRED), ignored=DIVISORS)


def from_hf(read: Reader) -> ModelConfig:
    if read.get("sliding_window") is not None:
        raise read.error("asks for sliding_window, which llama does not have; is it a mistral?")
    return hf.with_shared_kv(read, hf.decoder(read))


FAMILY = Family(
    architecture="llama",
    shape="llama",
    hf=FileFormat(from_hf, HF),
    gguf=FileFormat(gguf.decoder, GGUF_PAIRED),
)
