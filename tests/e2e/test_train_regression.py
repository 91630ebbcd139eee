"""Exits that predict numbers: trained over a frozen encoder and together with it, calibrated, saved, and used."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from headrace.llm import LLM
from headrace.runner.classifier import first_exit
from headrace.startup.classifier import CALIBRATION, INFO
from headrace.training.classifier import ClassifierConfig, exit_logits, read_labelled, train
from tests.cli_shell import Shell
from tests.server.harness import Running
from tests.tiny_bert import LAYERS, write_tiny_bert

TOLERANCE = 0.4


def write_numbers(path: Path, count: int, seed: int) -> Path:
    """Texts of six words; the number is half of how many of them are "water"."""
    draw, lines = random.Random(seed), []
    for _ in range(count):
        wet = draw.randrange(6)
        words = ["water"] * wet + draw.choices(["the", "mill", "stands", "by", "a", "."], k=6 - wet)
        draw.shuffle(words)
        lines.append(json.dumps({"text": " ".join(words), "label": wet / 2}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def folder(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("numbers")
    data = write_numbers(place / "train.jsonl", 400, 1)
    config = ClassifierConfig(delta=0.2, tolerance=TOLERANCE, threads=1)
    report = train(str(bert), read_labelled(data, numbers=True), place / "out", config)
    assert report.accuracy[-1] > 0.8
    assert [rule.criterion for rule in report.rules] == ["patience"]
    return place / "out"


def test_numbers_of_texts_from_the_command_line(bert: Path, tmp_path: Path, shell: Shell) -> None:
    data, dev, out = (
        write_numbers(tmp_path / "train.jsonl", 400, 1),
        write_numbers(tmp_path / "dev.jsonl", 60, 2),
        tmp_path / "out",
    )
    train = ("train-classifier", bert, "-d", data, "--threads", "1", "--delta", "0.2")
    code, said, err = shell(*train, "-o", out, "--tolerance", TOLERANCE)
    assert code == 0, err
    assert said.splitlines()[0].split() == ["after", "layer", "correlation"]
    assert json.loads((out / INFO).read_text())["tolerance"] == TOLERANCE
    (rule,) = json.loads((out / CALIBRATION).read_text())
    assert rule["criterion"] == "patience"
    lines = [json.loads(line) for line in dev.read_text().splitlines()]
    code, said, err = shell("classify", bert, "-c", out, "--show-exits", *(one["text"] for one in lines))
    assert code == 0, err
    made = [json.loads(line) for line in said.splitlines()]
    assert np.corrcoef([one["value"] for one in made], [one["label"] for one in lines])[0, 1] > 0.8
    assert all(one["exits"][-1] == {"layers": one["layers"], "value": one["value"]} for one in made)
    assert "bench exits measures classes" in shell("bench", "exits", bert, "-c", out, "-d", dev)[2]
    words = tmp_path / "words.jsonl"
    words.write_text(
        "\n".join(f'{{"text": "{at} mill {7 * at}", "label": "{"dry" if at % 2 else "wet"}"}}' for at in range(20))
    )
    for options, line in (
        (("-d", words, "--tolerance", "1"), ": --tolerance learns numbers; give numbers"),
        (("--tolerance", "0"), "--tolerance 0: give a number above 0"),
        (("--tolerance", "1", "--each-exit"), "--each-exit is for the entropy of classes"),
        ((), 'entry 1: wants "text"'),
    ):
        code, _, err = shell(*train, "-o", tmp_path / "no", *options)
        assert code != 0
        assert line in err


def test_a_text_stops_by_its_own_numbers(bert: Path, folder: Path) -> None:
    """The engine stops each text where the rule stops the numbers of all layers, with the bits that it has alone. Control: the
    exits differ, and a tolerance that is ignored would let all texts go at one layer."""
    texts = [json.loads(line)["text"] for line in write_numbers(folder.parent / "dev.jsonl", 80, 3).read_text().splitlines()]
    with LLM(bert, threads=1, classifier=folder) as llm:
        values = np.swapaxes(np.array(exit_logits(llm, texts)), 0, 1)
        found = {}
        for patience in (1, 2):
            made = llm.classify(texts, criterion="patience", threshold=patience)
            right = first_exit("patience", patience, values, TOLERANCE)
            assert [one.layers for one in made] == (right + 1).tolist()
            assert [one.value for one in made] == values[right, np.arange(len(texts)), 0].tolist()
            found[patience] = {one.layers for one in made}
        alone = [llm.classify([text], criterion="patience", threshold=1)[0].value for text in texts[:10]]
        assert alone == [one.value for one in llm.classify(texts, criterion="patience", threshold=1)][:10]
        assert {one.layers for one in llm.classify(texts, criterion="off")} == {LAYERS}
    assert len(found[1]) > 1


def test_the_server_answers_numbers(bert: Path, folder: Path) -> None:
    texts = ["the water stands by a mill", "water water water water water ."]
    with LLM(bert, threads=1, classifier=folder) as llm:
        expected = [one.record(votes=True) for one in llm.classify(texts)]
    with Running(bert, threads=1, classifier=str(folder)) as running:
        body = {"model": "tiny", "input": texts, "return_exits": True}
        answer = running.post("/v1/classify", body).json()
        assert [{**one, "index": 0, "object": ""} for one in answer["data"]] == [
            {**one, "index": 0, "object": ""} for one in expected
        ]
        refused = running.post("/v1/classify", {**body, "criterion": "max_prob", "threshold": 0.5})
        assert refused.status_code == 400
        assert "max_prob needs classes, and these exits predict numbers; use patience" in refused.json()["error"]["message"]


def test_a_damaged_tolerance_is_refused(bert: Path, folder: Path, tmp_path: Path) -> None:
    for change in ({"tolerance": 0.0}, {"labels": ["a", "b"]}, {"tolerance": None}):
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        place.mkdir()
        for path in folder.iterdir():
            if path.is_file():
                (place / path.name).write_bytes(path.read_bytes())
        info = json.loads((place / INFO).read_text())
        (place / INFO).write_text(json.dumps(info | change))
        with pytest.raises(ValueError, match="train it again|this classifier cannot be read"):
            LLM(bert, threads=1, classifier=place)


def test_numbers_are_learned_together_with_the_encoder(bert: Path, tmp_path: Path, shell: Shell) -> None:
    data, out = write_numbers(tmp_path / "train.jsonl", 300, 1), tmp_path / "out"
    train = ("train-classifier", bert, "-d", data, "-o", out, "--tolerance", "0.4", "--threads", "1", "--delta", "0.3")
    code, said, err = shell(*train, "--joint", "--epochs", "4", "--rate", "1e-3")
    assert code == 0, err
    r = [float(line.split()[1]) for line in said.splitlines()[1 : LAYERS + 1]]
    assert r[-1] > 0.8
    with LLM(out, threads=1, classifier=out) as llm:
        dry, wet = (llm.classify([text], criterion="off")[0].value for text in ("the mill stands by a .", "water " * 6))
    assert dry is not None
    assert wet is not None
    assert dry + 1 < wet
