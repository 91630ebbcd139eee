"""Real models in tests: prompts, and the same weights in `transformers`."""

from typing import Any

import gguf
import torch
import transformers

from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import read_tensor

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "Dear Sir or Madam,\n\n",
    "1, 2, 3, 5, 8, 13,",
    "The three laws of motion are",
    "Question: Why is the sky blue?\nAnswer:",
    "import numpy as np\n\ndef softmax(x):\n",
    "She opened the door and",
    "To make pancakes you need",
    "In 1969, the first",
    "The difference between a list and a tuple is",
    "SELECT name FROM",
    "Good morning! How can I",
    "Photosynthesis is the process by which",
    "<html>\n<head>",
    "My favourite book is",
    "今天天气很好，",
    "A haiku about autumn:\n",
]


def transformers_model(source: GGUFFile) -> Any:
    """The same file as a transformers model in float32."""
    meta = source.metadata
    arch = meta["general.architecture"]
    heads = meta[f"{arch}.attention.head_count"]
    kv_heads = meta[f"{arch}.attention.head_count_kv"]
    make = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[arch]
    config = make(
        vocab_size=source.info("token_embd.weight").shape[0],
        hidden_size=meta[f"{arch}.embedding_length"],
        intermediate_size=meta[f"{arch}.feed_forward_length"],
        num_hidden_layers=meta[f"{arch}.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=meta[f"{arch}.context_length"],
        rms_norm_eps=meta[f"{arch}.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta[f"{arch}.rope.freq_base"]},
        tie_word_embeddings="output.weight" not in source.names(),
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers)
    state = {}
    for name in model.state_dict():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored not in source.names():
            assert name == "lm_head.weight"
            stored = "token_embd.weight"
        tensor = read_tensor(source, stored, torch.float32)
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            parts = heads if ".q_proj." in name else kv_heads
            tensor = tensor.view(parts, -1, 2, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        state[name] = tensor
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were made on meta
    return model.eval()
