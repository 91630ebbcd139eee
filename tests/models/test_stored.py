"""A weight's way into a model and back: what is written is what was read, in both kinds of file."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.models.base import Model
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model, write_parts
from headrace.weights.parts import stored_as
from headrace.weights.safetensors import SafetensorsFolder
from tests.models.gguf_writer import write_gguf
from tests.models.zoo import CONFIGS, MemorySource, hf_source, loaded, oracle, pieces, written
from tests.tiny_bert import write_tiny_bert

ZOO = [(name, container) for name in CONFIGS for container in ("safetensors", "gguf")]
OTHER_NAME = ("mistral", "internlm3", "olmo3")  # GGUF files say "llama" or "olmo2"
WRITTEN = [pair for pair in ZOO if pair[1] == "safetensors" or not pair[0].startswith(OTHER_NAME)]


def same(ours: Model, theirs: Model) -> bool:
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    return all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


def back(model: Model, container: str, tensors: dict[str, torch.Tensor]) -> Model:
    return load_model(MemorySource(container, tensors, {}), config=model.config)


@pytest.mark.parametrize(("name", "container"), WRITTEN)
def test_a_written_model_is_read_unchanged(name: str, container: str) -> None:
    model = loaded(oracle(name))
    assert same(back(model, container, written(model, container)), model)


def test_a_written_encoder_is_read_unchanged(tmp_path: Path) -> None:
    folder = SafetensorsFolder(write_tiny_bert(tmp_path))
    model = load_model(folder)
    tensors = written(model, "safetensors")
    assert set(folder.names()) - set(tensors) == {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert same(back(model, "safetensors", tensors), model)


@pytest.mark.parametrize(
    ("name", "container", "change"),
    [
        ("llama-gqa", "gguf", {"row_order": None}),
        ("gemma3-one-kv-head", "safetensors", {"shift": 0.0}),
        ("gpt2", "safetensors", {"rows": None}),
    ],
)
def test_a_writer_without_a_layout_changes_the_model(name: str, container: str, change: dict[str, None]) -> None:
    """The control: the parts as a writer would have them that knows names alone, q, k and v of one tensor in another order."""
    model, values = loaded(oracle(name)), pieces(loaded(oracle(name)))
    tensors = {
        stored: write_parts([replace(part, **change) for part in reversed(parts)], values.__getitem__)  # type: ignore[arg-type]
        for stored, parts in stored_as(model, container).items()
    }
    assert not same(back(model, container, tensors), model)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tensors_equal_those_of_transformers(name: str) -> None:
    theirs = hf_source(oracle(name))
    tensors = written(load_model(theirs), "safetensors")
    assert tensors.keys() == theirs.tensors.keys()
    for key, stored in theirs.tensors.items():
        torch.testing.assert_close(tensors[key], stored, rtol=0, atol=1e-6 if name.startswith("gemma3") else 0)  # of w + 1


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-tied", "gemma3-one-kv-head", "gpt2"])
def test_the_tensors_equal_those_of_the_gguf_package(name: str, tmp_path: Path) -> None:
    source = GGUFFile(write_gguf(oracle(name), tmp_path / "model.gguf"))
    tensors = written(load_model(source), "gguf")
    assert sorted(tensors) == sorted(source.names())
    for key, ours in tensors.items():
        assert torch.equal(ours.reshape(-1), torch.from_numpy(source.raw(key).copy()).reshape(-1).view(torch.float32))
