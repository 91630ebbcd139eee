"""Training and calibrating exit classifiers, and measuring their savings, on texts with one word per class."""

import json
import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from headrace.bench.classifier import (
    Predictions,
    calibration_errors,
    confusion,
    confusion_scores,
    doubt,
    overthinking,
    separation,
)
from headrace.llm import LLM
from headrace.runner.classifier import CRITERIA, ExitClassifiers, first_exit
from headrace.startup.classifier import CALIBRATION, INFO
from headrace.stats.calibration import minimum_n
from headrace.training.classifier import LabelledTexts, calibrated, fit, grid_of, read_labelled
from headrace.training.overlap import split
from tests.cli_shell import Shell
from tests.tiny_bert import LAYERS, write_tiny_bert


def write_texts(path: Path, count: int, seed: int) -> Path:
    draw, lines = random.Random(seed), []
    for _ in range(count):
        label = draw.choice(("still", "flowing"))
        words = draw.choices(["the", "mill", "stands", "by", "a", "."], k=draw.randrange(2, 7))
        words.insert(draw.randrange(len(words)), "water" if label == "flowing" else "wheel")
        lines.append(json.dumps({"text": " ".join(words), "label": label}))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_from_texts_to_figures(tmp_path: Path, shell: Shell) -> None:
    bert, data = write_tiny_bert(tmp_path / "bert"), write_texts(tmp_path / "train.jsonl", 300, 1)
    folder, dev = tmp_path / "classifier", write_texts(tmp_path / "dev.jsonl", 80, 2)
    code, _, err = shell("train-classifier", bert, "-d", data, "-o", folder, "--delta", "0.1", "--threads", "1")
    assert code == 0, err
    rules = json.loads((folder / CALIBRATION).read_text())
    assert {one["criterion"] for one in rules} <= set(CRITERIA)
    assert rules == sorted(rules, key=lambda one: one["mean_layers"])
    assert rules[0]["mean_layers"] < LAYERS
    held = len(split(read_labelled(data).texts, 0.3, 0)[1])
    assert all(one["risk"] <= 0.1 and one["n"] == held for one in rules)
    figures, plot = tmp_path / "figures.json", tmp_path / "exits.svg"
    arguments = ("-c", folder, "-d", dev, "--rounds", "1", "--threads", "1", "--json", figures, "--plot", plot)
    code, _, err = shell("bench", "exits", bert, *arguments)
    assert code == 0, err
    found = json.loads(figures.read_text())
    assert found["full_accuracy"] > 0.8
    assert found["accuracy"] > found["full_accuracy"] - 0.15
    assert found["layers"] == pytest.approx(LAYERS / found["mean_layers"])
    assert [one["batch"] for one in found["batches"]] == [1, 8, 32]
    assert set(found["curves"]) == set(CRITERIA)
    assert len(found["calibration_error"]) == LAYERS
    assert 0 <= found["doubt"]["right"] <= 2 * (LAYERS - 1)
    right = sum(found["confusion"][at][at] for at in range(2))
    assert (sum(map(sum, found["confusion"])), right / 80) == (80, found["accuracy"])
    assert plot.read_text().startswith("<svg")
    known = read_labelled(dev)
    with LLM(bert, threads=1, classifier=folder) as llm:  # the curve is what really happens
        made = llm.classify(known.texts)
    assert np.mean([one.layers for one in made]) == pytest.approx(found["mean_layers"])
    assert np.mean([one.label == label for one, label in zip(made, known.labels, strict=True)]) == found["accuracy"]
    assert "the classifier has no label 'x'" in shell("bench", "exits", bert, "-c", folder, "-d", _one_label(tmp_path))[2]


def _one_label(folder: Path) -> Path:
    path = folder / "other.tsv"
    path.write_text("sentence\tlabel\nthe mill\tx\n")
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no texts"),
        ("{}\n", 'entry 1: wants "text"'),
        ('{"text": "a", "label": true}\n', 'entry 1: wants "text"'),
        ("no\n", "line 1: wants a JSON object"),
        ('{"text": "a", "pair": "", "label": 1}\n', 'entry 1: "pair"'),
    ],
)
def test_texts_that_cannot_be_read(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_labelled(path)


def test_invalid_tables_are_a_one_line_error(tmp_path: Path) -> None:
    """Bytes that are none, a cell that is longer than csv reads, values nested without an end."""
    for name, data, says in (
        ("a.tsv", b"text\tlabel\n\xff\t1\n", r"a\.tsv is not UTF-8 text"),
        ("a.csv", b"text,label\n" + b"a" * 200_000 + b",1\n", r"a\.csv cannot be read as a table"),
        ("a.jsonl", b'{"text":' + b"[" * 200_000 + b"\n", "line 1: wants a JSON object"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=says):
            read_labelled(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--layers", "1,2"), "the last after layer 3"),
        (("--layers", "a"), "takes numbers"),
        (("--delta", "2"), "between 0 and 1"),
        (("--check", "DATA"), "all 20 texts of --check are also in --data"),
    ],
)
def test_training_that_cannot_be_is_refused(tmp_path: Path, shell: Shell, options: tuple[str, ...], says: str) -> None:
    bert, data = write_tiny_bert(tmp_path / "bert"), write_texts(tmp_path / "train.jsonl", 20, 1)
    options = tuple(str(data) if one == "DATA" else one for one in options)
    code, _, err = shell("train-classifier", bert, "-d", data, "-o", tmp_path / "out", *options)
    assert code != 0
    assert says in err


def test_the_entropy_gets_a_threshold_for_each_exit(tmp_path: Path, shell: Shell) -> None:
    """Only with the option; the rule opens again, and classifies as its own thresholds given by hand."""
    bert, data = write_tiny_bert(tmp_path / "bert"), write_texts(tmp_path / "train.jsonl", 300, 1)
    train = ("train-classifier", bert, "-d", data, "--delta", "0.2", "--threads", "1")
    assert shell(*train, "-o", tmp_path / "one")[0] == 0
    code, said, err = shell(*train, "-o", tmp_path / "each", "--each-exit")
    assert code == 0, err
    rules = [
        {one["criterion"]: one["threshold"] for one in json.loads((tmp_path / name / CALIBRATION).read_text())}
        for name in ("one", "each")
    ]
    assert isinstance(rules[0]["entropy"], float)
    assert len(rules[1]["entropy"]) == LAYERS - 1
    assert {name for name in rules[1] if rules[1][name] != rules[0][name]} == {"entropy"}
    assert ",".join(f"{one:.4g}" for one in rules[1]["entropy"]) in said
    texts = read_labelled(data).texts[:40]
    with LLM(bert, threads=1, classifier=tmp_path / "each") as llm:
        calibrated = [one.layers for one in llm.classify(texts, criterion="entropy")]
        by_hand = [one.layers for one in llm.classify(texts, criterion="entropy", threshold=tuple(rules[1]["entropy"]))]
    assert calibrated == by_hand
    assert min(calibrated) < LAYERS


def test_texts_that_trained_do_not_calibrate(tmp_path: Path, shell: Shell) -> None:
    """Any overlap counts, not only that of a whole file: 299 of 300 texts that trained would show what they like."""
    bert, data = write_tiny_bert(tmp_path / "bert"), write_texts(tmp_path / "train.jsonl", 300, 1)
    trained = {json.loads(line)["text"] for line in data.read_text().splitlines()}
    fresh = [line for line in write_texts(tmp_path / "dev.jsonl", 80, 2).read_text().splitlines() if len(line) > 60]
    fresh = [line for line in fresh if json.loads(line)["text"] not in trained]
    check = tmp_path / "check.jsonl"
    again = [line.replace('"text": "', '"text": "  ') for line in data.read_text().splitlines()]
    check.write_text("\n".join([*again, *fresh]) + "\n")
    more = ("-o", tmp_path / "out", "--delta", "0.7", "--threads", "1")
    code, _, err = shell("train-classifier", bert, "-d", data, "--check", check, *more)
    assert code == 0, err
    assert f"300 of {300 + len(fresh)} texts of --check are also in --data and were left out" in err
    assert {one["n"] for one in json.loads((tmp_path / "out" / CALIBRATION).read_text())} == {len(fresh)}
    # The choice among five criteria is paid for: 5 texts show a loss below 0.5 at epsilon 0.05, and not at a fifth of it.
    few = ("-o", tmp_path / "few", "--delta", "0.5", "--threads", "1")
    assert minimum_n(0.5, 0.05) <= len(fresh) < minimum_n(0.5, 0.01)
    assert shell("train-classifier", bert, "-d", data, "--check", check, *few)[0] == 0
    assert json.loads((tmp_path / "few" / CALIBRATION).read_text()) == []


def test_a_split_keeps_phrases_with_their_sentence(tmp_path: Path) -> None:
    """No text on one side is part of a text on the other; phrases of sentences on both sides are left out and counted."""
    draw = random.Random(3)
    sentences = [" ".join(f"w{draw.randrange(500)}" for _ in range(12)) for _ in range(60)]
    phrases = [" ".join(one.split()[at : at + 4]) for one in sentences for at in (0, 5)]
    common = ["Shared  words", "shared words"]
    sentences = [f"{one} shared words" for one in sentences]
    texts = [*sentences, *phrases, *common]
    learned, held, left_out = split(texts, 0.3, 0)
    assert (len(learned), len(held), left_out) == (3 * 42, 3 * 18, 2)
    assert sorted([*learned, *held]) == list(range(len(texts) - 2))
    sides = [[texts[at] for at in side] for side in (learned, held)]
    assert not any(f" {one} " in f" {other} " for one, other in product(*sides))
    assert not any(f" {one} " in f" {other} " for other, one in product(*sides))
    plain = [f"text {number} alone" for number in range(20)]
    assert [len(side) for side in split(plain, 0.3, 0)[:2]] == [14, 6]


def test_files_with_a_header_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('sentence\tlabel\nthe "mill\t1\n')
    (tmp_path / "a.csv").write_text('text,label\n"the mill, turning",1\n')
    assert read_labelled(tmp_path / "a.tsv") == LabelledTexts(['the "mill'], ["1"])
    assert read_labelled(tmp_path / "a.csv") == LabelledTexts(["the mill, turning"], ["1"])


def test_a_fit_finds_the_line() -> None:
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(400, 5)) * 10 + 100).astype(np.float32)
    classes = (rows[:, 2] > 100).astype(np.int64)
    weight, bias = fit(rows, classes, 2, 1e-4)
    assert ((rows @ weight.T + bias).argmax(-1) == classes).mean() > 0.97


def test_measures_of_each_criterion() -> None:
    said = np.array([[[0.7, 0.3], [0.5, 0.5]], [[0.9, 0.1], [0.4, 0.6]]])  # exits, texts, classes
    found = {name: criterion.measure(said) for name, criterion in CRITERIA.items()}
    assert found["max_prob"] == pytest.approx([0.9, 0.6])
    assert found["margin"] == pytest.approx([0.8, 0.2])
    assert found["entropy"] == pytest.approx([-0.9 * np.log(0.9) - 0.1 * np.log(0.1), -0.4 * np.log(0.4) - 0.6 * np.log(0.6)])
    assert found["kl"] == pytest.approx([0.9 * np.log(9 / 7) + 0.1 * np.log(1 / 3), 0.4 * np.log(0.8) + 0.6 * np.log(1.2)])
    assert found["patience"].tolist() == [1, 0]
    assert first_exit("max_prob", 0.65, said).tolist() == [0, 1]
    assert first_exit("patience", 1.0, np.repeat(said[:1], 4, 0)).tolist() == [1, 1]


def test_calibration_error_of_an_exit() -> None:
    """By hand: two texts in a bin, one of them right, said with 0.9 and 0.92; and a whole answer that is always right."""
    first = [[0.9, 0.1], [0.08, 0.92], [0.6, 0.4], [0.6, 0.4]]
    said = Predictions(np.array([first, [[1.0, 0.0]] * 4]), np.array([0, 0, 0, 0]), np.array([1, 2]))
    # bins of a fifteenth: 0.9 and 0.92 together, 0.6 and 0.6
    assert calibration_errors(said) == pytest.approx([(abs(1.82 - 1) + abs(1.2 - 2)) / 4, 0.0])
    assert confusion(said, "max_prob", 0.91) == [[3, 1], [0, 0]]
    assert confusion(said, "", 0.0) == [[4, 0], [0, 0]]


def test_text_pairs_are_read_and_learned(tmp_path: Path, shell: Shell) -> None:
    """A class that the second text tells, by first row and mean; then asked for by two texts with a tab between them."""
    draw, lines = random.Random(7), ["sentence1\tsentence2\tlabel"]
    for _ in range(240):
        a, b = draw.choice(("mill", "wheel")), draw.choice(("mill", "wheel"))
        lines.append(f"the {a}\tby a {b}\t{'flow' if b == 'mill' else 'rest'}")
    data, bert, folder = tmp_path / "pairs.tsv", write_tiny_bert(tmp_path / "bert"), tmp_path / "out"
    data.write_text("\n".join(lines) + "\n")
    assert read_labelled(data, 1).texts == [tuple(lines[1].split("\t")[:2])]
    code, _, err = shell("train-classifier", bert, "-d", data, "-o", folder, "--pooling", "both", "--threads", "1")
    assert code == 0, err
    assert json.loads((folder / INFO).read_text())["pooling"] == "both"
    for second, label in (("by a mill", "flow"), ("by a wheel", "rest")):
        arguments = ("-c", folder, "--pairs", "--show-exits", "--criterion", "off", f"the wheel\t{second}")
        code, out, err = shell("classify", bert, *arguments)
        assert code == 0, err
        made = json.loads(out)
        assert made["label"] == label
        assert [one["layers"] for one in made["exits"]] == list(range(1, LAYERS + 1))
        assert made["exits"][-1] == {"layers": LAYERS, "label": label, "probability": made["probabilities"][label]}
    assert "--pairs: a line must be two texts" in shell("classify", bert, "-c", folder, "--pairs", "the wheel")[2]
    assert (
        "--pooling takes first, mean or both"
        in shell("train-classifier", bert, "-d", data, "-o", folder, "--pooling", "all")[2]
    )


def test_overthinking_is_counted() -> None:
    right = np.array([[1, 1, 0, 0], [0, 1, 0, 1], [0, 1, 0, 1]])  # exits, texts; the first is forgotten
    said = np.stack([1 - right, right], -1).astype(float)
    found = overthinking(Predictions(said, np.ones(4, np.int64), np.array([2, 4, 6])))
    assert found == {"wasteful": 0.5, "destructive": 0.25, "of_errors": 0.5, "best": 0.75, "needed": 3.0}


def test_confusion_of_exits_by_hand() -> None:
    """Three exits, two texts: the first text's exits agree; the second's first exit lies 1.2 from the last, its second 0.4."""
    probs = np.array([[[0.9, 0.1], [0.8, 0.2]], [[0.9, 0.1], [0.4, 0.6]], [[0.9, 0.1], [0.2, 0.8]]])
    np.testing.assert_allclose(confusion_scores(probs), [0.0, 1.6], atol=1e-12)
    scores, wrong = np.array([1.0, 3.0, 2.0, 2.0]), np.array([False, True, True, False])
    assert separation(scores, wrong) == (2 + 1.5) / 4  # the tie of 2 and 2 counts half
    assert np.isnan(separation(scores, np.zeros(4, bool)))


def test_confusion_finds_errors_where_exits_disagree() -> None:
    """Texts on which the last exit errs have exits that disagree. Control: exits of other texts tell nothing."""
    rng = np.random.default_rng(3)
    wrong = rng.random(2000) < 0.3
    other = np.where(wrong, 0.5, 0.1) > rng.random((4, 2000))  # the earlier exits that disagree with the last one
    first = np.where(other, 0.3, 0.8)
    probs = np.concatenate([first, np.full((1, 2000), 0.8)])
    found = Predictions(np.stack([1 - probs, probs], -1), np.where(wrong, 0, 1), np.arange(1, 6))
    told = doubt(found)
    assert told["confusion"] > 0.8
    assert told["wrong"] > told["right"] + 0.5
    assert told["probability"] == 0.5
    shuffled = np.concatenate([probs[:4, rng.permutation(2000)], probs[4:]])
    control = doubt(Predictions(np.stack([1 - shuffled, shuffled], -1), found.classes, found.layers))
    assert abs(control["confusion"] - 0.5) < 3 * control["error"] < 0.06


def test_calibrated_thresholds_keep_their_promise() -> None:
    """Of many calibrations at most epsilon, and three standard errors, choose a threshold that loses more than delta. Control:
    the least careful threshold that lost little on the same texts breaks that in half of the settings at least."""
    runs, epsilon, rng = 40, 0.05, np.random.default_rng(5)
    exits, grid = ExitClassifiers((1, 2), ("a", "b"), "mean", np.empty(0), np.empty(0)), grid_of("max_prob", 2, 2)
    true = dict(zip(grid, lost(*world(np.random.default_rng(9), 40_000), grid), strict=True))
    most, naive_breaks = epsilon + 3 * (epsilon * (1 - epsilon) / runs) ** 0.5, 0
    for n, delta in ((150, 0.02), (150, 0.05), (150, 0.1), (300, 0.02), (300, 0.05), (300, 0.1)):
        broken = naive = 0
        for _ in range(runs):
            said, classes = world(rng, n)
            rules = calibrated(exits, said, classes, delta, epsilon, ("max_prob",))
            broken += any(true[rule.threshold] > delta for rule in rules)
            risks = zip(grid, lost(said, classes, grid), strict=True)
            naive += true[max((t for t, risk in risks if risk <= delta), key=grid.index)] > delta
        assert broken / runs <= most
        naive_breaks += naive / runs > most
    assert naive_breaks >= 3


def world(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """An early exit that is as sure as it is right, and a last one that always is."""
    sure, classes = rng.uniform(0.5, 1, n), rng.integers(0, 2, n)
    early = np.where(rng.random(n) < sure, classes, 1 - classes)
    first = np.where(early[:, None] == np.arange(2), sure[:, None], 1 - sure[:, None])
    return np.stack([first, np.eye(2)[classes]]), classes


def lost(said: np.ndarray, classes: np.ndarray, grid: list[float]) -> list[float]:
    """The share that an early exit loses, threshold by threshold."""
    wrong, sure = said[0].argmax(-1) != classes, said[0].max(-1)
    return [float((wrong & (sure >= threshold)).mean()) for threshold in grid]
