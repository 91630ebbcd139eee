"""sentence-transformers' modules: pooling, dense matrices, prompts; and their refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.numpy import save_file

from headrace.llm import LLM
from headrace.weights.sentence import PromptError
from headrace.weights.source import WeightError
from tests.cli_shell import Shell
from tests.models.zoo import in_float64
from tests.places import model_file
from tests.tiny_bert import HIDDEN, write_tiny_bert
from tests.tiny_rerankers import write_answering

TEXTS = ["the mill stands by a river", "a wheel"]
PROMPTS = {"query": "water : ", "passage": "river : "}
EXACT: dict[str, Any] = {"backend": "torch", "dtype": "float64", "threads": 1, "device": "cpu"}
KINDS = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")


def write_modules(
    folder: Path, pooling: dict[str, Any], *, prompts: dict[str, Any] | None = None, hidden: int = HIDDEN
) -> list[Any]:
    """Modules with two dense matrices, the first with tanh and a bias. Returns weights and biases."""
    modules = []
    for number, kind in enumerate(KINDS):
        name = "" if kind == "Transformer" else f"{number}_{kind}"
        modules.append({"idx": number, "name": str(number), "path": name, "type": f"sentence_transformers.models.{kind}"})
        (folder / name).mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": hidden, **pooling}))
    rng, made = np.random.default_rng(1), []
    for place, (size, width), activation in (
        ("2_Dense", (48, hidden), "activation.Tanh"),
        ("3_Dense", (24, 48), "linear.Identity"),
    ):
        tensors = {"linear.weight": rng.normal(size=(size, width)).astype(np.float32)}
        if activation == "activation.Tanh":
            tensors["linear.bias"] = rng.normal(size=size).astype(np.float32)
        settings = {"in_features": width, "out_features": size, "activation_function": f"torch.nn.modules.{activation}"}
        settings["bias"] = "linear.bias" in tensors
        (folder / place / "config.json").write_text(json.dumps(settings))
        save_file(tensors, folder / place / "model.safetensors", {"format": "pt"})
        made.append(tensors)
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return made


@torch.no_grad()
def rows(folder: Path, ids: list[int]) -> np.ndarray:
    model = transformers.AutoModel.from_pretrained(folder).double().eval()
    found: np.ndarray = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return found


POOLINGS = {
    "pooling_mode_cls_token": lambda x: x[0],
    "pooling_mode_mean_tokens": lambda x: x.mean(0),
    "pooling_mode_lasttoken": lambda x: x[-1],
}


@pytest.mark.parametrize("mode", POOLINGS)
def test_pooling_and_dense_matrices_equal_their_formula(mode: str, tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "bert")
    tanh, last = write_modules(folder, {"pooling_mode_cls_token": False, mode: True})
    with LLM(folder, **EXACT) as llm:
        made = llm.embed(TEXTS)
        assert [len(one.values) for one in llm.embed(TEXTS, dimensions=8)] == [8, 8]
        with pytest.raises(ValueError, match="dimensions must be 1 to 24"):
            llm.embed(TEXTS, dimensions=25)
    for one in made:
        pooled = POOLINGS[mode](rows(folder, one.token_ids))
        expected = last["linear.weight"] @ np.tanh(tanh["linear.weight"] @ pooled + tanh["linear.bias"])
        assert np.abs(one.values - expected / np.linalg.norm(expected)).max() < 1e-6
        plain = last["linear.weight"] @ (tanh["linear.weight"] @ pooled + tanh["linear.bias"])
        assert np.abs(one.values - plain / np.linalg.norm(plain)).max() > 1e-3  # control: without tanh


def test_prompts_stand_before_texts(tmp_path: Path, shell: Shell) -> None:
    folder = write_tiny_bert(tmp_path / "bert")
    write_modules(folder, {"pooling_mode": "mean"}, prompts={"prompts": PROMPTS, "default_prompt_name": "query"})
    with LLM(folder, **EXACT) as llm:
        query, document, plain = (llm.embed(TEXTS, prompt_name=name) for name in ("query", "document", None))
        assert [one.token_ids for one in query] == [llm.tokenizer.encode(PROMPTS["query"] + text) for text in TEXTS]
        assert [one.token_ids for one in document] == [llm.tokenizer.encode(PROMPTS["passage"] + text) for text in TEXTS]
        assert [one.values for one in plain] == [one.values for one in query]  # the default
        assert [one.values for one in plain] != [one.values for one in document]
        with pytest.raises(PromptError, match="no prompt 'title'; it has query, passage"):
            llm.embed(TEXTS, prompt_name="title")
        with pytest.raises(ValueError, match="needs texts, not token ids"):
            llm.embed([[2, 5, 3]], prompt_name="query")
    code, out, err = shell("embed", folder, "a wheel", "--prompt", "document", "--dtype", "float32", "--backend", "torch")
    assert code == 0, err
    assert json.loads(out)["embedding"] == pytest.approx(document[1].values, abs=1e-4)
    assert "no prompt 'x'" in shell("embed", folder, "a wheel", "--prompt", "x")[2]
    bare = write_tiny_bert(tmp_path / "bare")
    with LLM(bare, **EXACT) as llm, pytest.raises(PromptError, match="it has none: write it into the texts"):
        llm.embed(TEXTS, prompt_name="query")


def settings(folder: Path, place: str, **change: Any) -> None:
    path = folder / place
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def test_what_is_not_supported_is_refused_in_one_line(tmp_path: Path) -> None:
    mean = {"pooling_mode_mean_tokens": True}
    cases: tuple[tuple[dict[str, Any], str, Any, str], ...] = (
        ({"pooling_mode_max_tokens": True}, "", None, "pooling 'max_tokens' is not supported"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "", None, "is not supported"),
        ({"pooling_mode": "weightedmean"}, "", None, "pooling 'weightedmean' is not supported"),
        ({**mean, "include_prompt": False}, "", None, "without the prompt's tokens"),
        (mean, "2_Dense/config.json", {"activation_function": "torch.nn.ReLU"}, "activation 'ReLU' is not supported"),
        (mean, "config_sentence_transformers.json", {"prompts": [1]}, "prompts must be texts by name"),
        (mean, "config_sentence_transformers.json", {"default_prompt_name": "x"}, "is none of the prompts"),
    )
    for number, (pooling, place, change, says) in enumerate(cases):
        folder = write_tiny_bert(tmp_path / str(number))
        write_modules(folder, pooling, prompts={"prompts": {}})
        if place:
            settings(folder, place, **change)
        with pytest.raises(WeightError, match=says) as error:
            LLM(folder, **EXACT)
        assert "\n" not in str(error.value)
    folder = write_tiny_bert(tmp_path / "modules")
    write_modules(folder, mean)
    for modules, says in (
        ([{"type": "sentence_transformers.models.CNN", "path": ""}], "module 'CNN' is not supported"),
        ([{"type": "a.Pooling", "path": "../elsewhere"}], "must be a list of modules"),
        ({"a": 1}, "must be a list of modules"),
        ([{"type": "a.Dense", "path": "3_Dense"}], "24 x 48 and reads 32 values"),
    ):
        (folder / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(WeightError, match=says):
            LLM(folder, **EXACT)


@pytest.mark.parametrize("kind", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_qwen3_embedding_equals_transformers(kind: str, tmp_path: Path) -> None:
    """An end token after each text, its row, an instruction as the prompt of queries. Also saved without an output matrix."""
    folder = tmp_path / "model"
    theirs = write_answering(folder, kind, tie_word_embeddings=kind == "Qwen3ForCausalLM")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = backend.token_to_id("<|im_end|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|im_end|>", pair="$A $B <|im_end|>", special_tokens=[("<|im_end|>", end)]
    )
    backend.save(str(folder / "tokenizer.json"))
    modules = [{"type": f"sentence_transformers.models.{one}", "path": one} for one in ("Pooling", "Normalize")]
    (folder / "modules.json").write_text(json.dumps([{"type": "a.Transformer", "path": ""}, *modules]))
    (folder / "Pooling").mkdir()
    (folder / "Pooling/config.json").write_text(json.dumps({"pooling_mode_lasttoken": True, "include_prompt": True}))
    instruct = "Instruct: retrieve passages\nQuery:"
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": instruct, "document": ""}, "default_prompt_name": None})
    )
    base = getattr(theirs, "model", theirs)
    with LLM(folder, **EXACT) as llm:
        made = llm.embed(TEXTS, prompt_name="query"), llm.embed(TEXTS, prompt_name="document")
    for prompt, embeddings in zip((instruct, ""), made, strict=True):
        for text, one in zip(TEXTS, embeddings, strict=True):
            assert one.token_ids == backend.encode(prompt + text).ids
            with in_float64(), torch.no_grad():
                states = base(torch.tensor([one.token_ids])).last_hidden_state[0]
            for at, near in ((-1, True), (-2, False)):  # control: the row before the end token
                row = (states[at] / states[at].norm()).numpy()
                assert (float(np.abs(one.values - row).max()) < 1e-9) is near


@pytest.mark.weights
def test_minilm_by_its_own_modules() -> None:
    """MiniLM's folder: its modules give the mean, by `transformers` the same vector."""
    folder = model_file("all-MiniLM-L6-v2")
    with LLM(folder, backend="torch", dtype="float32", threads=1, device="cpu") as llm:
        assert llm.opened.pooling == "mean"
        for one in llm.embed(["The mill stands by the river.", "猫 und Käse: naïve façade", "mill " * 200]):
            expected = rows(folder, one.token_ids).mean(0)
            assert np.dot(one.values, expected) / np.linalg.norm(expected) > 0.99995


def test_the_start_says_which_outputs_are_not_read(shell: Shell, tmp_path: Path) -> None:
    """bge-m3's folder has matrices for two further outputs. Control: a folder without them."""
    write_tiny_bert(tmp_path)
    code, _, err = shell("embed", tmp_path, "a wheel")
    assert (code, "not read" in err) == (0, False)
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        (tmp_path / name).write_bytes(b"pickle")
    code, _, err = shell("embed", tmp_path, "a wheel")
    assert code == 0
    assert "dense embeddings only (sparse_linear.pt and colbert_linear.pt not read)" in err
