"""Embeddings, rankings and adapters equal those of sentence-transformers and peft (`make test-peers`)."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.llm import LLM
from tests.e2e.test_adapters import PROMPTS, ours, write_base
from tests.e2e.test_sentence import write_modules
from tests.places import model_file, peer_python
from tests.tiny_bert import write_tiny_bert
from tests.tiny_rerankers import write_cross_encoder

pytestmark = pytest.mark.peers

ROOT = Path(__file__).resolve().parents[2]
EXACT: dict[str, Any] = {"backend": "torch", "dtype": "float64", "threads": 1, "device": "cpu"}
TEXTS = ["The mill stands by the river.", "猫 und Käse: naïve façade", "a wheel", "mill " * 200]
QUERY, DOCUMENTS = "the water wheel", ["the mill stands by a river", "a wheel", "water turns the wheel", "by"]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": LINEAR},
    "rslora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": LINEAR,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6},
        "alpha_pattern": {"k_proj": 3, "layers.1.mlp.up_proj": 24},
    },
    "layers": {"r": 3, "lora_alpha": 6, "target_modules": ["o_proj", "down_proj"], "layers_to_transform": [0, 2]},
    "expression": {"r": 5, "lora_alpha": 5, "target_modules": r".*\.(1|2)\.self_attn\.(q|k)_proj", "bias": "none"},
    "excluded": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "exclude_modules": ["k_proj", "lm_head"]},
}


def run(module: str, package: str, *arguments: object) -> None:
    """Run a module of these tests in an interpreter that has the package."""
    command = [peer_python(package), "-m", f"tests.models.{module}", *map(str, arguments)]
    settings = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, timeout=600, cwd=ROOT, env={**os.environ, **settings})


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_adapters_equal_peft(name: str, tmp_path: Path) -> None:
    """Folders that peft itself wrote. Control: each differs from the others."""
    write_base(tmp_path / "base", name)
    conv = {"transposed": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}}
    settings = conv if name == "gpt2" else ADAPTERS
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    (tmp_path / "out").mkdir()
    run("peft_logits", "peft", *(tmp_path / each for each in ("base", "settings.json", "prompts.json", "out")))
    paths = {each: tmp_path / "out" / each for each in settings}
    base = ours(tmp_path / "base", paths, [0] * len(PROMPTS))
    for number, (each, path) in enumerate(paths.items(), 1):
        made = ours(tmp_path / "base", paths, [number] * len(PROMPTS))
        with np.load(path.with_suffix(".npz")) as stored:
            expected = [torch.from_numpy(stored[f"arr_{at}"]) for at in range(len(PROMPTS))]
        gaps = [float((a - b).abs().max()) for a, b in zip(made, expected, strict=True)]
        assert max(gaps) <= 1e-10, each
        assert min(float((a - b).abs().max()) for a, b in zip(base, expected, strict=True)) > 1e-3, each


def test_modules_equal_sentence_transformers(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "bert")
    prompts = {"prompts": {"query": "water : ", "document": ""}, "default_prompt_name": None}
    write_modules(folder, {"pooling_mode_mean_tokens": True}, prompts=prompts)
    texts = ["the mill stands by a river", "a wheel"]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    with LLM(folder, **EXACT) as llm:
        for prompt in ("query", "document"):
            run("sentence_vectors", "sentence_transformers", folder, tmp_path / "texts.json", tmp_path / "out.npy", prompt)
            expected = np.load(tmp_path / "out.npy")
            made = np.array([one.values for one in llm.embed(texts, prompt_name=prompt)])
            other = np.array([one.values for one in llm.embed(texts, prompt_name="query" if prompt != "query" else "document")])
            assert np.abs(made - expected).max() < 1e-5
            assert np.abs(other - expected).max() > 1e-3  # control


@pytest.mark.weights
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_minilm_equals_sentence_transformers(backend: str, tmp_path: Path) -> None:
    """The real folder: cosine 1.0000 in float32, and of the core in bfloat16 above 0.999."""
    folder = model_file("all-MiniLM-L6-v2")
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    run("sentence_vectors", "sentence_transformers", folder, tmp_path / "texts.json", tmp_path / "out.npy")
    expected = np.load(tmp_path / "out.npy")
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu"} if backend == "torch" else {}
    with LLM(folder, backend=backend, threads=1, **settings) as llm:
        made = np.array([one.values for one in llm.embed(TEXTS)])
    cosines = (made * expected).sum(-1)
    print([f"{cosine:.5f}" for cosine in cosines])
    assert cosines.min() > (0.99995 if backend == "torch" else 0.999)
    assert (made[0] * expected[2]).sum() < 0.9  # control: another text


@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_scores_equal_those_of_a_cross_encoder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_cross_encoder(folder, name)
    inputs = ["input_ids", "token_type_ids", "attention_mask"][:: 1 if name == "bert" else 2]
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "model_input_names": inputs}))
    (tmp_path / "pairs.json").write_text(json.dumps([[QUERY, document] for document in DOCUMENTS]))
    run("sentence_vectors", "sentence_transformers", folder, tmp_path / "pairs.json", tmp_path / "out.npy", "--pairs")
    expected = np.load(tmp_path / "out.npy")
    with LLM(folder, **EXACT) as llm:
        made = {one.index: one.score for one in llm.rank(QUERY, DOCUMENTS)}
    assert np.abs(np.array([made[at] for at in range(len(DOCUMENTS))]) - expected).max() < 1e-4
    assert expected.max() - expected.min() > 0.01
