"""Rerankers: scores and order equal those of `transformers`; broken heads are refused in one line."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from headrace import core
from headrace.llm import LLM
from headrace.weights import ranking
from headrace.weights.source import WeightError
from tests.cli_shell import Shell
from tests.models.zoo import in_float64
from tests.tiny_bert import write_tiny_bert
from tests.tiny_rerankers import (
    CONFIGS,
    unigram,
    write_answering,
    write_cross_encoder,
    write_gguf_answering,
    write_gguf_cross_encoder,
)

QUERY = "the water wheel"
DOCUMENTS = ["the mill stands by a river", "a wheel", "water turns the wheel, the mills turned", "a river, a wheel", "by"]
EXACT: dict[str, Any] = {"backend": "torch", "dtype": "float64", "threads": 1, "device": "cpu"}


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


@torch.no_grad()
def logits(theirs: Any, folder: Path, types: bool = True) -> list[float]:
    """The logit of each pair by `transformers`, in float64."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pair = []
    for document in DOCUMENTS:
        ids = backend.encode(QUERY, document).ids
        sep = ids.index(3)
        more = {"token_type_ids": torch.tensor([[0] * (sep + 1) + [1] * (len(ids) - sep - 1)])} if types else {}
        with in_float64():
            pair.append(float(theirs(torch.tensor([ids]), **more).logits[0, 0]))
    return pair


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cross_encoder_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs = write_cross_encoder(tmp_path / "model", name)
    expected = [sigmoid(one) for one in logits(theirs, tmp_path / "model", types=name == "bert")]
    assert max(expected) - min(expected) > 0.01
    with LLM(tmp_path / "model", **EXACT) as llm:
        made = llm.rank(QUERY, DOCUMENTS)
        assert [one.index for one in made] == sorted(range(5), key=lambda index: -expected[index])
        for one in made:
            assert one.score == pytest.approx(expected[one.index], abs=1e-10)
        assert [one.index for one in llm.rank(QUERY, DOCUMENTS, top_n=2)] == [one.index for one in made[:2]]


@pytest.mark.skipif(not core.available(), reason=core.reason())
@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "modernbert"])
def test_the_native_core_ranks_alike_and_gives_the_same_bits_in_any_batch(name: str, tmp_path: Path) -> None:
    theirs = write_cross_encoder(tmp_path / "model", name)
    expected = [sigmoid(one) for one in logits(theirs, tmp_path / "model", types=name == "bert")]
    with LLM(tmp_path / "model", backend="native", threads=2) as llm:
        made = {one.index: one.score for one in llm.rank(QUERY, DOCUMENTS)}
        alone = [llm.rank(QUERY, [document])[0].score for document in DOCUMENTS]
        many = {one.index % 5: one.score for one in llm.rank(QUERY, DOCUMENTS * 7)}
    assert alone == [made[index] for index in range(5)]
    assert many == made
    for index, score in made.items():
        assert score == pytest.approx(expected[index], abs=0.05)


def test_the_scores_are_raw_if_the_model_asks_for_it(tmp_path: Path) -> None:
    """sentence-transformers' settings, in their old and new form. Control: a sigmoid is seen."""
    identity = "torch.nn.modules.linear.Identity"
    for number, settings in enumerate(
        ({"sbert_ce_default_activation_function": identity}, {"sentence_transformers": {"activation_fn": identity}})
    ):
        folder = tmp_path / str(number)
        expected = logits(write_cross_encoder(folder, "bert", **settings), folder)
        with LLM(folder, **EXACT) as llm:
            for one in llm.rank(QUERY, DOCUMENTS):
                assert one.score == pytest.approx(expected[one.index], abs=1e-9)
                assert abs(one.score - sigmoid(expected[one.index])) > 1e-3


SLIPS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "one token type": lambda patch: patch.setattr("headrace.startup.opening.with_separator", lambda config, _: config),
    "sigmoid twice": lambda patch: patch.setattr(ranking, "_sigmoid", lambda row: sigmoid(sigmoid(float(row[0])))),
    "another pooling": lambda patch: patch.setattr(ranking, "FIRST", "last"),
    "no pooler": lambda patch: patch.setattr("numpy.tanh", lambda row: row),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_wrong_ranker_is_seen(slip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    expected = [sigmoid(one) for one in logits(write_cross_encoder(folder, "bert"), folder)]
    SLIPS[slip](monkeypatch)
    with LLM(folder, **EXACT) as llm:
        assert max(abs(one.score - expected[one.index]) for one in llm.rank(QUERY, DOCUMENTS)) > 1e-3


def test_a_decoder_that_answers_equals_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-reranker"
    theirs = write_answering(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = []
    for document in DOCUMENTS:
        text = f"<Instruct>: {ranking.INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}"
        ids = backend.encode(ranking.BEFORE + text + ranking.AFTER).ids
        with in_float64(), torch.no_grad():
            last = theirs(torch.tensor([ids])).logits[0, -1]
        yes, no = (float(last[backend.token_to_id(word)]) for word in ("yes", "no"))
        expected.append(sigmoid(yes - no))
    with LLM(folder, **EXACT) as llm:
        made = llm.rank(QUERY, DOCUMENTS)
        assert [one.index for one in made] == sorted(range(5), key=lambda index: -expected[index])
        for one in made:
            assert one.score == pytest.approx(expected[one.index], abs=1e-9)
    (tmp_path / "tiny-reranker").rename(tmp_path / "tiny")
    with LLM(tmp_path / "tiny", **EXACT) as llm, pytest.raises(ValueError, match="no head to rank with"):
        llm.rank(QUERY, DOCUMENTS)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


HEAD = "classifier.weight"
BROKEN: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "no head": (lambda tensors: tensors.pop(HEAD), "'classifier.weight' is missing; this file cannot rank"),
    "two labels": (lambda tensors: tensors.update({HEAD: tensors[HEAD].repeat(2, 1)}), "has 2 outputs"),
    "NaN": (lambda tensors: tensors[HEAD].fill_(math.nan), "NaN"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_head_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    folder, (change, says) = tmp_path / "model", BROKEN[what]
    write_cross_encoder(folder, "bert")
    change_tensors(folder, change)
    with pytest.raises(WeightError, match=says) as error, LLM(folder, **EXACT) as llm:
        llm.rank(QUERY, DOCUMENTS)
    assert "\n" not in str(error.value)


def test_what_cannot_be_ranked_is_refused(tmp_path: Path, shell: Shell) -> None:
    folder = tmp_path / "model"
    write_cross_encoder(folder, "bert")
    with LLM(folder, **EXACT) as llm:
        (one,) = llm.rank("[SEP]", ["a wheel [SEP] a mill"])
        assert one.token_ids.count(3) == 2, "names of control tokens are text"
        with pytest.raises(ValueError, match="the query is empty"):
            llm.rank("", DOCUMENTS)
        with pytest.raises(ValueError, match="documents must be"):
            llm.rank(QUERY, [])
        with pytest.raises(ValueError, match="top_n must be 1 or more"):
            llm.rank(QUERY, DOCUMENTS, top_n=0)
        with pytest.raises(ValueError, match="shorten it"):
            llm.rank(QUERY, ["a wheel " * 200])
        with pytest.raises(ValueError, match="encoder and cannot generate"):
            llm.generate("a")
    plain = write_tiny_bert(tmp_path / "plain")
    code, out, err = shell("rerank", plain, QUERY, *DOCUMENTS)
    assert (code, out) == (1, "")
    assert "no head to rank with" in err


def test_the_command(tmp_path: Path, shell: Shell) -> None:
    folder = tmp_path / "model"
    write_cross_encoder(folder, "xlm-roberta")
    with LLM(folder, threads=1) as llm:
        expected = llm.rank(QUERY, DOCUMENTS, top_n=3)
    code, out, err = shell("rerank", folder, QUERY, *DOCUMENTS, "--top", "3", "--threads", "1")
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["index"], line["text"]) for line in lines] == [(one.index, DOCUMENTS[one.index]) for one in expected]
    assert [line["score"] for line in lines] == [one.score for one in expected]


def answered(theirs: Any, folder: Path) -> list[float]:
    """Probability of yes for each document by `transformers`, in float64."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    scores = []
    for document in DOCUMENTS:
        text = f"<Instruct>: {ranking.INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}"
        ids = backend.encode(ranking.BEFORE + text + ranking.AFTER).ids
        with in_float64(), torch.no_grad():
            last = theirs(torch.tensor([ids])).logits[0]
        if last.dim() == 2:
            yes, no = (backend.token_to_id(word) for word in ("yes", "no"))
            last = last[-1, yes : yes + 1] - last[-1, no : no + 1]
        scores.append(sigmoid(float(last[0])))
    return scores


def check_ranking(path: Path, expected: list[float], within: float = 1e-9) -> None:
    with LLM(path, **EXACT) as llm:
        made = llm.rank(QUERY, DOCUMENTS)
    assert [one.index for one in made] == sorted(range(5), key=lambda index: -expected[index])
    for one in made:
        assert one.score == pytest.approx(expected[one.index], abs=within)


@pytest.mark.parametrize("name", ["xlm-roberta", "modernbert", "modernbert-mean"])
def test_a_gguf_cross_encoder_equals_transformers(name: str, tmp_path: Path) -> None:
    """The head's tensors alone say that the file ranks, as those of the converter do."""
    theirs = write_cross_encoder(tmp_path / "model", name)
    pooling = {"modernbert": 2, "modernbert-mean": None}.get(name)
    path = write_gguf_cross_encoder(theirs, tmp_path / "tiny.gguf", pooling=pooling)
    backend, expected = unigram(), []
    for document in DOCUMENTS:
        with in_float64(), torch.no_grad():
            expected.append(sigmoid(float(theirs(torch.tensor([backend.encode(QUERY, document).ids])).logits[0, 0])))
    assert max(expected) - min(expected) > 0.01
    check_ranking(path, expected)
    other = write_gguf_cross_encoder(theirs, tmp_path / "other.gguf", pooling=1 if name == "modernbert" else 2)
    if name != "xlm-roberta":  # control: the other pooling is seen
        with LLM(other, **EXACT) as llm:
            assert max(abs(one.score - expected[one.index]) for one in llm.rank(QUERY, DOCUMENTS)) > 1e-3


def test_a_gguf_of_bert_without_its_pooler_is_refused(tmp_path: Path) -> None:
    """The converter leaves the pooler out, and scores without it are wrong."""
    path = write_gguf_cross_encoder(write_cross_encoder(tmp_path / "model", "bert"), tmp_path / "tiny.gguf")
    with pytest.raises(WeightError, match="lacks the pooler of its head"):
        LLM(path, **EXACT)


def test_a_gguf_decoder_that_answers_equals_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    theirs = write_answering(folder)
    expected = answered(theirs, folder)
    check_ranking(write_gguf_answering(theirs, folder, tmp_path / "tiny.gguf"), expected)


def test_a_decoder_that_answers_is_known_by_its_files(tmp_path: Path) -> None:
    """By the heading of its model card, by sentence-transformers' module, and by a head of one label."""
    folder = tmp_path / "tiny"
    theirs = write_answering(folder)
    expected = answered(theirs, folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Qwen3-Reranker-0.6B\n")
    check_ranking(folder, expected)
    (folder / "README.md").write_text("# Qwen3-0.6B\nThere is also a reranker.\n")
    with LLM(folder, **EXACT) as llm, pytest.raises(ValueError, match="no head to rank with"):
        llm.rank(QUERY, DOCUMENTS)
    (folder / "1_LogitScore").mkdir()
    kinds = ("base.modules.transformer.Transformer", ""), ("cross_encoder.modules.logit_score.LogitScore", "1_LogitScore")
    (folder / "modules.json").write_text(
        json.dumps([{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in kinds])
    )
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    yes, no = (backend.token_to_id(word) for word in ("yes", "no"))
    settings = folder / "1_LogitScore/config.json"
    settings.write_text(json.dumps({"true_token_id": yes, "false_token_id": no}))
    check_ranking(folder, expected)
    settings.write_text(json.dumps({"true_token_id": no, "false_token_id": yes}))  # control: the ids are read
    check_ranking(folder, [1 - score for score in expected])
    settings.write_text(json.dumps({"true_token_id": yes, "false_token_id": None}))
    with pytest.raises(WeightError, match="must have true_token_id"):
        LLM(folder, **EXACT)


@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_with_one_label_equals_transformers(tied: bool, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    theirs = write_answering(folder, "Qwen3ForSequenceClassification", num_labels=1, pad_token_id=255, tie_word_embeddings=tied)
    check_ranking(folder, answered(theirs, folder))
