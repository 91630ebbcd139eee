"""Classifiers with early exit: a text's result does not depend on the others, and without exits it equals the full model's."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace.data.params import SamplingParams
from headrace.data.plan import Classified, Classify, Feed
from headrace.decoding.prompts import Classifying, Pooling
from headrace.engine.engine import AdmissionError
from headrace.llm import LLM
from headrace.runner.classifier import CRITERIA, ClassifierRun, ExitClassifiers, _pool, first_exit, probabilities
from headrace.startup.classifier import CALIBRATION, INFO, WEIGHTS, ClassifierThreshold, load, save
from headrace.startup.opening import open_files
from tests.cli_shell import Shell
from tests.tiny_bert import HIDDEN, LAYERS, write_tiny_bert
from tests.tiny_files import write_tiny_gguf

TEXTS = [*(f"the {word} stands by a river {'wheel ' * n}" for n, word in enumerate(("mill", "water", "wheel", "turn"))), "a"]
ONE = SamplingParams(max_tokens=1)
LABELS = ("bad", "fine", "good")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def folder(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of random weights."""
    rng = np.random.default_rng(3)
    weight, bias = rng.normal(size=(LAYERS, len(LABELS), HIDDEN)) * 0.3, rng.normal(size=(LAYERS, len(LABELS))) * 0.1
    place = tmp_path_factory.mktemp("classifier")
    with LLM(bert) as llm:
        rules = [
            ClassifierThreshold("max_prob", 0.5, 0.1, 0.05, "hb", 100, 0.02, 2.0),
            ClassifierThreshold("margin", 0.9, 0.1, 0.05, "hb", 100, 0.0, 2.9),
        ]
        save(place, ExitClassifiers((1, 2, 3), LABELS, "mean", weight, bias), llm.opened, {}, rules)
    return place


@pytest.fixture(scope="module", params=["native", "torch"])
def llm(request: pytest.FixtureRequest, bert: Path, folder: Path) -> Iterator[LLM]:
    with LLM(bert, backend=request.param, threads=1, device="cpu", classifier=folder) as made:
        yield made


def same(llm: LLM, a: Any, b: Any) -> bool:
    """Bitwise on the native core; torch's sums depend on how many rows there are."""
    if llm.backend == "native":
        return bool(np.array_equal(a, b))
    return bool(np.allclose(a, b, atol=1e-5))


def test_pairs_are_two_texts_read_as_one(llm: LLM) -> None:
    a, b = "the mill stands", "by a river"
    ids = [*llm.tokenizer.encode(a), *llm.tokenizer.encode(b)[1:]]
    as_pair, as_ids, joined = llm.classify([(a, b), ids, f"{a} {b}"], criterion="off")
    assert as_pair.token_ids == as_ids.token_ids == ids != joined.token_ids
    assert same(llm, list(as_pair.probabilities.values()), list(as_ids.probabilities.values()))
    assert len(llm.classify((a, b))) == 2, "a tuple of texts is two of them"


def test_votes_list_every_exit_up_to_the_one_taken(llm: LLM) -> None:
    for made in llm.classify(TEXTS, criterion="max_prob", threshold=0.5):
        assert [one.layers for one in made.votes] == list(range(1, made.layers + 1))
        assert made.votes[-1].label == made.label
        assert made.votes[-1].probability == made.probabilities[made.label]
        assert all(one.probability < 0.5 for one in made.votes[:-1])


def test_pooling_both_concatenates_the_first_row_and_the_mean() -> None:
    rows = np.arange(12.0).reshape(3, 4)
    assert _pool(rows, "both").tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def logits(llm: LLM, texts: list[str], rule: tuple[str, float]) -> list[np.ndarray]:
    return [np.array(one.classified) for one in llm._pooled(texts, Classifying(*rule))]


def middling(llm: LLM, criterion: str) -> tuple[str, float]:
    """A rule by which some texts leave where they first can, and some do not."""
    said = probabilities(np.stack(logits(llm, TEXTS, ("", 0.0)), 1))
    first = said[:2] if criterion in ("kl", "patience") else said[:1]
    return criterion, 1.0 if criterion == "patience" else float(np.median(CRITERIA[criterion].measure(first)))


def whole_model(llm: LLM, text: str) -> np.ndarray:
    """What the last exit says of a text whose rows went through all layers at once: pooled as an embedding is."""
    assert llm.classifier is not None
    exits = llm.classifier.exits
    (ids,) = llm._encode_running(text)
    request = llm.engine.add(ids, ONE, strategy=Pooling("mean"))
    while llm.engine.busy:
        llm.engine.step()
    pooled = np.array(request.pooled)[None] / len(request.prompt)
    return exits.logits(len(exits.layers) - 1, pooled)[0]


def test_an_unreachable_threshold_equals_the_full_model(llm: LLM) -> None:
    never = [("", 0.0), ("entropy", 0.0), ("kl", 0.0), ("patience", LAYERS - 1.0), ("max_prob", 1.0)]
    expected = [whole_model(llm, text) for text in TEXTS]
    for rule in never:
        found = logits(llm, TEXTS, rule)
        assert all(len(each) == LAYERS for each in found)
        assert same(llm, [each[-1] for each in found], expected)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_early_exits_change_no_other_text(llm: LLM, criterion: str) -> None:
    """Every exit a text came by says what it says when nobody leaves; texts leave where the rule says, alone or together."""
    rule = middling(llm, criterion)
    full = np.stack(logits(llm, TEXTS, ("", 0.0)), 1)
    expected = first_exit(*rule, probabilities(full))
    if criterion != "patience":
        assert len(set(expected.tolist())) > 1, "some were meant to leave, and not all at once"
    for found in (logits(llm, TEXTS, rule), [logits(llm, [text], rule)[0] for text in TEXTS]):
        assert [len(each) - 1 for each in found] == expected.tolist()
        assert all(same(llm, each, full[: len(each), at]) for at, each in enumerate(found))


def test_rows_of_another_text_change_the_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: after some have left, the others' rows are taken from where they were not."""
    right = ClassifierRun._places

    def wrong(self: ClassifierRun, numbers: Any) -> Iterator[slice]:
        for place in right(self, numbers):
            yield slice(max(place.start - 1, 0), max(place.start - 1, 0) + place.stop - place.start)

    full = np.stack(logits(llm, TEXTS, ("", 0.0)), 1)
    rule = middling(llm, "max_prob")
    monkeypatch.setattr(ClassifierRun, "_places", wrong)
    found = logits(llm, TEXTS, rule)
    assert not all(same(llm, each, full[: len(each), at]) for at, each in enumerate(found))


def test_rows_that_leave_cost_nothing_more(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program is fed, stage by stage, is the texts that are still there and no other."""
    fed: list[tuple[int, int, int]] = []
    program = llm.runner.programs[0]
    run = type(program).run

    def counted(self: Any, step: Any, span: Any, rows: Any = None, keep: bool = False) -> Any:
        made = run(self, step, span, rows, keep)
        fed.append((span.first, span.layers, len(made)))
        return made

    monkeypatch.setattr(type(program), "run", counted)
    criterion, threshold = middling(llm, "max_prob")
    fed.clear()
    made = llm.classify(TEXTS, criterion=criterion, threshold=threshold)
    lengths = [len(one.token_ids) for one in made]
    left = [one.layers for one in made]
    assert [(first, last) for first, last, _ in fed] == [(at, at + 1) for at in range(max(left))]
    assert [rows for *_, rows in fed] == [
        sum(n for n, layers in zip(lengths, left, strict=True) if layers > at) for at in range(max(left))
    ]
    assert fed[0][2] > fed[-1][2]


def test_embeddings_and_classes_share_a_step(llm: LLM) -> None:
    """What is pooled from stays to the end, whoever leaves beside it, under different rules."""
    expected = [one.values for one in llm.embed(TEXTS)]
    assert llm.classifier is not None
    encoded = llm._encode_running(TEXTS)
    full = np.stack(logits(llm, TEXTS, ("", 0.0)), 1)
    rules = [middling(llm, name) for name in CRITERIA]
    pooled = [llm.engine.add(ids, ONE, strategy=Pooling("mean")) for ids in encoded]
    classes = [llm.engine.add(ids, ONE, strategy=Classifying(*rule)) for ids, rule in zip(encoded, rules, strict=True)]
    while llm.engine.busy:
        llm.engine.step()
    for request, values in zip(pooled, expected, strict=True):
        row = np.array(request.pooled)
        assert same(llm, row / np.linalg.norm(row), values) or np.allclose(row / np.linalg.norm(row), values, atol=1e-12)
    for at, request in enumerate(classes):
        assert same(llm, request.classified, full[: len(request.classified), at])
    llm.engine.check()


def test_a_class_is_a_label_with_probabilities(llm: LLM) -> None:
    made = llm.classify(TEXTS)
    for one in made:
        assert one.label in LABELS
        assert sum(one.probabilities.values()) == pytest.approx(1)
        assert one.probabilities[one.label] == max(one.probabilities.values())
        assert 1 <= one.layers <= LAYERS
    by_hand = llm.classify(TEXTS, criterion="max_prob", threshold=0.5)
    assert [(one.label, one.layers) for one in made] == [(one.label, one.layers) for one in by_hand]  # as calibrated
    assert {one.layers for one in llm.classify(TEXTS, criterion="off")} == {LAYERS}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"criterion": "best", "threshold": 0.5}, "unknown criterion 'best'; use max_prob, margin"),
        ({"criterion": "max_prob", "threshold": 1.5}, "the threshold of max_prob must be 0 to 1 here, not 1.5"),
        ({"criterion": "entropy", "threshold": 1.2}, "must be 0 to 1.09861 here"),
        ({"criterion": "kl", "threshold": -1.0}, "must be 0 or more here"),
        ({"criterion": "patience", "threshold": 3.0}, "must be 0 to 2 here"),
        ({"criterion": "entropy"}, "no threshold of entropy was calibrated"),
        ({"threshold": 0.5}, "threshold needs a criterion"),
        ({"criterion": "off", "threshold": 0.5}, "threshold needs a criterion"),
        ({"criterion": "max_prob", "threshold": float("nan")}, "not nan"),
        ({"criterion": "max_prob", "threshold": (0.5, 1.5)}, "must be 0 to 1 here, not 1.5"),
        ({"criterion": "max_prob", "threshold": (0.5,)}, "give one threshold, or 2: one for each exit but the last, not 1"),
        ({"criterion": "patience", "threshold": (1.0, 1.0, 1.0)}, "give one threshold, or 2: .* not 3"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(llm: LLM, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        llm.classify(TEXTS, **given)


def test_each_exit_may_have_its_threshold(llm: LLM) -> None:
    """Equal thresholds are one threshold; 1 at the first exit and 0 at the second stops every text at the second."""
    _, at = middling(llm, "max_prob")
    one = [each.layers for each in llm.classify(TEXTS, criterion="max_prob", threshold=at)]
    assert [each.layers for each in llm.classify(TEXTS, criterion="max_prob", threshold=(at, at))] == one
    assert len(set(one)) > 1
    assert {each.layers for each in llm.classify(TEXTS, criterion="max_prob", threshold=[1.0, 0.0])} == {2}
    assert {each.layers for each in llm.classify(TEXTS, criterion="max_prob", threshold=(1.0, 1.0))} == {3}


def test_the_command_takes_a_threshold_for_each_exit(bert: Path, folder: Path, shell: Shell) -> None:
    rule = ("--criterion", "entropy", "--threshold")
    code, said, _ = shell("classify", bert, "-c", folder, *TEXTS[:2], *rule, "0,1.09")
    assert (code, [json.loads(line)["layers"] for line in said.splitlines()]) == (0, [2, 2])
    code, _, err = shell("classify", bert, "-c", folder, TEXTS[0], *rule, "0,x")
    assert code != 0
    assert "--threshold: give a number, or several with commas, not '0,x'" in err


def test_a_classifier_of_another_model_is_refused(bert: Path, folder: Path, llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(AdmissionError, match="cannot generate text; request embeddings or classes"):
        llm.generate("the mill")
    with LLM(bert) as plain, pytest.raises(ValueError, match="no classifier was opened; train one"):
        plain.classify("the mill")
    with pytest.raises(ValueError, match="classifiers need an encoder"):
        LLM(write_tiny_gguf(tmp_path / "tiny.gguf"), classifier=folder)
    other = write_tiny_bert(tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["bert.encoder.layer.1.output.dense.bias"][0] += 0.25
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="is another model; train one for it"):
        LLM(other, classifier=folder)
    with pytest.raises(ValueError, match=r"has no classifier \(classifier.json is missing\); train one: headrace train-cl"):
        LLM(bert, classifier=tmp_path)
    (tmp_path / "heads.json").write_text("{}")
    with pytest.raises(ValueError, match="holds trained heads or exits of a model .*, and no classifier; train one"):
        LLM(bert, classifier=tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("layers", [1, 3, 2], "ascending"),
        ("layers", [1, 2], "the last after layer 3"),
        ("labels", ["a", "a", "b"], "different labels"),
        ("pooling", "most", "unknown pooling"),
        ("version", 9, "version 9"),
        ("labels", ["a", "b"], "not of the shape"),
        ("layers", "x", "cannot be read"),
    ],
)
def test_a_damaged_classifier_is_refused(bert: Path, folder: Path, tmp_path: Path, field: str, value: Any, says: str) -> None:
    info = json.loads((folder / INFO).read_text()) | {field: value}
    (tmp_path / INFO).write_text(json.dumps(info))
    (tmp_path / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())
    with pytest.raises(ValueError, match=says):
        LLM(bert, classifier=tmp_path)


@pytest.mark.parametrize("name", [INFO, CALIBRATION])
def test_invalid_utf8_is_refused_with_the_folder(name: str, bert: Path, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "c")
    (tmp_path / "c" / name).write_bytes((folder / name).read_bytes().replace(b"max_prob", b"max_\xff").replace(b"bad", b"\xff"))
    with pytest.raises(ValueError, match="c: this classifier cannot be read"):
        load(tmp_path / "c", open_files(bert))


def test_a_half_written_classifier_is_refused(
    bert: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one is written over another: its weights with the thresholds of the other would promise what nobody has shown."""
    place, model, right = tmp_path / "classifier", open_files(bert), os.replace
    shutil.copytree(folder, place)
    known = load(place, model)

    def full(old: Path, new: Path) -> None:
        if Path(new).name == CALIBRATION:
            raise OSError("No space left on device")
        right(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            save(place, known.exits, model, {}, ())
    with pytest.raises(ValueError, match="has no classifier"):
        load(place, model)
    save(place, known.exits, model, {}, known.rules)
    assert load(place, model).rules == known.rules


def test_wants_and_answers_round_trip_through_msgpack() -> None:
    feed = Feed(0, 0, 3, wants=(Classify("margin", 0.25),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(feed), type=Feed) == feed
    answer = Classified(((0.5, 1.0), (2.0, -1.0)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=Classified) == answer


def test_the_command(bert: Path, folder: Path, shell: Shell) -> None:
    code, out, err = shell("classify", bert, "-c", folder, *TEXTS)
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    assert [one["text"] for one in found] == TEXTS
    assert all(one["label"] in LABELS and 1 <= one["layers"] <= LAYERS for one in found)
    probabilities = [value for one in found for value in one["probabilities"].values()]
    assert probabilities == [float(f"{value:.7g}") for value in probabilities]
    assert "must be 0 to 1" in shell("classify", bert, "-c", folder, "a", "--criterion", "margin", "--threshold", "2")[2]
