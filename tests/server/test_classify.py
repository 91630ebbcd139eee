"""/v1/classify: the classes of `LLM.classify`, limits, and one-line errors."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.llm import LLM
from headrace.runner.classifier import ExitClassifiers
from headrace.server.protocols import classify as classes
from headrace.startup.classifier import ClassifierThreshold, load, save
from headrace.startup.opening import open_files
from tests.server.harness import Running
from tests.tiny_bert import CONTEXT, HIDDEN, LAYERS, write_tiny_bert

TEXTS = ["the mill stands by a river", "a wheel", "water turns the wheel"]
LABELS = ("bad", "good")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def folder(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, place = np.random.default_rng(3), tmp_path_factory.mktemp("classifier")
    exits = ExitClassifiers((1, 3), LABELS, "mean", rng.normal(size=(2, 2, HIDDEN)) * 0.3, np.zeros((2, 2)))
    with LLM(bert) as llm:
        save(place, exits, llm.opened, {}, [ClassifierThreshold("max_prob", 0.7, 0.1, 0.05, "hb", 100, 0.02, 2.0)])
    return place


@pytest.fixture(scope="module")
def server(bert: Path, folder: Path) -> Iterator[Running]:
    with Running(bert, threads=1, classifier=str(folder)) as running:
        yield running


def test_classes_equal_those_of_the_llm(server: Running, bert: Path, folder: Path) -> None:
    with LLM(bert, threads=1, classifier=folder) as llm:
        for given in ({}, {"criterion": "off"}, {"criterion": "entropy", "threshold": 0.5}):
            answer = server.post("/v1/classify", {"model": "tiny", "input": TEXTS * 20, **given}).json()
            expected = llm.classify(TEXTS * 20, **given)  # type: ignore[arg-type]
            assert [one["index"] for one in answer["data"]] == list(range(60))
            for one, right in zip(answer["data"], expected, strict=True):
                assert (one["label"], one["layers"]) == (right.label, right.layers)
                assert one["probabilities"] == right.probabilities
            assert all("exits" not in one for one in answer["data"])
            assert answer["usage"]["prompt_tokens"] == sum(len(one.token_ids) for one in expected)
        assert {one["layers"] for one in server.post("/v1/classify", {"model": "tiny", "input": [5, 6]}).json()["data"]} <= {
            1,
            LAYERS,
        }


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"criterion": "best", "threshold": 0.5}, "unknown criterion 'best'"),
        ({"criterion": "max_prob", "threshold": 1.5}, "must be 0 to 1"),
        ({"criterion": "entropy"}, "no threshold of entropy was calibrated"),
        ({"threshold": 0.5}, "threshold needs a criterion"),
        ({"input": []}, "input is empty"),
        ({"input": [[10**9]]}, "is not in the vocabulary"),
        ({"input": ["a"] * 2049}, "at most 2048 inputs"),
        ({"input": [[5] * (CONTEXT + 1)]}, "shorten"),
        ({"pooling": "mean"}, "unknown field 'pooling'"),
        ({"threshold": "high"}, "threshold"),
    ],
)
def test_a_bad_request_is_refused(server: Running, change: dict[str, Any], says: str) -> None:
    answer = server.post("/v1/classify", {"model": "tiny", "input": "a", **change})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_return_exits_returns_the_votes_of_each_exit(server: Running, bert: Path, folder: Path) -> None:
    asked = {"model": "tiny", "input": TEXTS, "criterion": "off", "return_exits": True}
    with LLM(bert, threads=1, classifier=folder) as llm:
        expected = llm.classify(TEXTS, criterion="off")
    for one, right in zip(server.post("/v1/classify", asked).json()["data"], expected, strict=True):
        assert one["exits"] == [vote.record() for vote in right.votes]
        assert [vote["layers"] for vote in one["exits"]] == [1, LAYERS]


def test_texts_that_run_deeper_than_calibrated_are_seen(bert: Path, folder: Path, tmp_path: Path) -> None:
    """The alarm's figure: layers of the last texts under the calibrated rule, in its standard deviations. Texts under a rule of
    the client's own do not count."""
    known = load(folder, open_files(bert))
    rule = ClassifierThreshold("max_prob", 1.0, 0.1, 0.05, "hb", 100, 0.0, 1.5, 0.5)  # no text is that sure
    save(tmp_path, known.exits, open_files(bert), {}, [rule])
    with Running(bert, threads=1, classifier=str(tmp_path)) as running:

        def figures() -> tuple[float, float]:
            text = running.http.get("/metrics").text
            names = "exit_layer_sum", "exit_layers_above_calibration"
            total, above = (float(re.findall(rf"headrace:{name}{{[^}}]*}} (\S+)", text)[0]) for name in names)
            return total, above

        own = {"model": "tiny", "input": TEXTS, "criterion": "max_prob"}
        assert running.post("/v1/classify", {**own, "threshold": 0.0}).status_code == 200
        assert figures() == (len(TEXTS) * 1, 0.0)
        assert running.post("/v1/classify", {"model": "tiny", "input": TEXTS}).status_code == 200
        assert figures() == (len(TEXTS) * (1 + LAYERS), (LAYERS - 1.5) / 0.5)


def test_an_answer_has_at_most_the_maximum_of_probabilities(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "MAX_PROBABILITIES", 6)
    assert server.post("/v1/classify", {"model": "tiny", "input": TEXTS}).status_code == 200
    answer = server.post("/v1/classify", {"model": "tiny", "input": [*TEXTS, "a"]})
    assert answer.status_code == 400
    assert "8 probabilities and 6 are the most" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/classify", "/v1/embeddings"])
def test_many_answers_yield_to_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Of the event loop: others have theirs after every 32 texts, or fewer where there are many labels."""
    turns: list[float] = []

    async def sleep(seconds: float) -> None:
        turns.append(seconds)

    monkeypatch.setattr("headrace.server.protocols.time_slices.asyncio", SimpleNamespace(sleep=sleep))
    found = server.post(path, {"model": "tiny", "input": [[5, 6]] * 70}).json()["data"]
    assert [one["index"] for one in found] == list(range(70))
    assert turns == [0, 0]
    if path == "/v1/classify":
        monkeypatch.setattr(classes, "PROBABILITIES_PER_SLICE", 40)  # of two labels those of 20 texts
        assert server.post(path, {"model": "tiny", "input": [[5, 6]] * 70}).json()["data"] == found
        assert turns == [0] * 5


def test_a_text_as_long_as_the_context_is_taken(server: Running) -> None:
    assert server.post("/v1/classify", {"model": "tiny", "input": [5] * CONTEXT}).status_code == 200


def test_a_classifier_writes_nothing(server: Running) -> None:
    talk = [{"role": "user", "content": "the mill"}]
    for path, asked in (
        ("completions", {"prompt": "the mill"}),
        ("chat/completions", {"messages": talk}),
        ("responses", {"input": "the mill"}),
    ):
        answer = server.post(f"/v1/{path}", {"model": "tiny", **asked})
        assert answer.status_code == 400
        assert "request embeddings or classes" in answer.json()["error"]["message"]


def test_a_model_without_a_classifier_is_a_400(wide: Running) -> None:
    answer = wide.post("/v1/classify", {"model": "tiny", "input": "a"})
    assert answer.status_code == 400
    assert "served without a classifier" in answer.json()["error"]["message"]
