"""Real models: greedy tokens equal `transformers` on the same dequantised float32 weights.

The transformers model is built from our dequantised tensors under the names of the `gguf` package, so what is compared is
everything above the dequantiser. It is run once over prompt and answer: its choice at each place equals ours if and only if
its own greedy text is ours.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from headrace.text.tokenizer import Tokenizer
from headrace.weights.dequant import read_tensor
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from tests.models.data import model_file
from tests.models.feeding import greedy

COUNT = 64
TIE = 1e-4  # a top-2 gap below this may go either way
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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@torch.no_grad()
def differences(theirs: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """How far the oracle prefers another token, wherever it does."""
    logits = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return [float(gap) for gap in logits.max(-1).values - chosen if gap > 0]


def check(path: Path, texts: list[str]) -> None:
    with GGUFFile(path) as source:
        tokenizer = Tokenizer.from_gguf(source.metadata)
        prompts = [tokenizer.encode(text) for text in texts]
        answers = greedy(load_model(source), prompts, COUNT)
        theirs = transformers_model(source)
    gaps = {text: differences(theirs, *pair) for text, *pair in zip(texts, prompts, answers, strict=True)}
    different = {text: found for text, found in gaps.items() if found}
    print(f"{path.name}: {len(texts)} x {COUNT} tokens, not the oracle's first choice: {different or 'none'}")
    assert all(gap < TIE for found in gaps.values() for gap in found), different
    # Negative control: an answer with one token changed is caught.
    wrong = [*answers[0][:10], (answers[0][10] + 1) % 1000, *answers[0][11:]]
    assert any(gap > TIE for gap in differences(theirs, prompts[0], wrong))


@pytest.mark.weights
def test_smollm2_20_prompts() -> None:
    check(model_file("SmolLM2-135M-Instruct.Q4_1.gguf"), PROMPTS)


@pytest.mark.weights
@pytest.mark.slow
def test_qwen_coder_8_prompts() -> None:
    check(model_file("Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"), PROMPTS[:8])
