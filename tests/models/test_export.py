"""A GGUF file written as a Hugging Face folder is the same model: to transformers, and to our own loader."""

from pathlib import Path

import pytest
import torch
import transformers

from headrace.compress.export import hf_config, tensors, write_folder
from headrace.models.base import Model
from headrace.models.registry import read_config
from headrace.text.tokenizer import Tokenizer
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.source import WeightSource
from tests.models.feeding import feed
from tests.models.gguf_writer import write_gguf
from tests.models.zoo import oracle, oracle_logits, prompts
from tests.tiny_files import write_tiny_gguf

TRANSLATED = ["llama-mha-tied", "llama-gqa", "llama-rope-linear", "llama-wide-heads", "llama-biases", "mistral-no-window"]
TRANSLATED += ["qwen2-tied", "qwen2-mqa", "qwen3", "qwen3-biases-tied"]
OTHERS = {"gemma3-one-kv-head": "gemma3_text", "gpt2": "gpt2", "llama-rope-llama3": "rotary", "mistral-window": "sliding"}


@pytest.mark.parametrize("name", TRANSLATED)
def test_the_folder_is_the_model_to_transformers(name: str, tmp_path: Path) -> None:
    theirs = oracle(name).bfloat16()  # weights that bfloat16 holds exactly
    source = GGUFFile(write_gguf(theirs, tmp_path / "model.gguf"))
    config = hf_config(read_config(source), None, None)
    read = transformers.AutoConfig.for_model(**config)
    read._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(read).bfloat16().eval()
    missing, surplus = model.load_state_dict(tensors(source, read_config(source)), strict=False)
    assert (missing, surplus) == ((["lm_head.weight"] if config["tie_word_embeddings"] else []), [])
    model.tie_weights()
    for ours, wanted in zip(oracle_logits(model.float(), prompts()), oracle_logits(theirs.float(), prompts()), strict=True):
        assert torch.equal(ours, wanted)


def rounded(source: WeightSource) -> Model:
    """A model whose weights are rounded to bfloat16, and which computes in float32."""
    model = load_model(source, torch.bfloat16)
    for _, holder in model.holders():
        for field in holder.params():
            setattr(holder, field, getattr(holder, field).float())
    return model


@pytest.mark.parametrize(("name", "what"), OTHERS.items())
def test_unsupported_architectures_are_refused(name: str, what: str, tmp_path: Path) -> None:
    source = GGUFFile(write_gguf(oracle(name), tmp_path / "model.gguf"))
    with pytest.raises(ValueError, match=what):
        hf_config(read_config(source), None, None)


def test_a_whole_folder_is_written_and_read_back(tmp_path: Path) -> None:
    source = GGUFFile(write_tiny_gguf(tmp_path / "tiny.gguf"))
    write_folder(source, tmp_path / "folder")
    folder = SafetensorsFolder(tmp_path / "folder")
    batch = [[1, 2, 3, 4, 5], [9, 8]]
    ours, back = (feed(rounded(one), batch, "whole") for one in (source, folder))
    assert all(torch.equal(a, b) for a, b in zip(ours, back, strict=True))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    text = "the water of the river"
    assert tokenizer.encode(text) == Tokenizer.from_gguf(source.metadata).encode(text)
    assert tokenizer.encode(text) == Tokenizer.from_folder(tmp_path / "folder").encode(text)
    assert tokenizer.decode(tokenizer.encode("größer 水渠")) == "größer 水渠"
    assert transformers.AutoConfig.from_pretrained(tmp_path / "folder").eos_token_id == folder.config["eos_token_id"]
