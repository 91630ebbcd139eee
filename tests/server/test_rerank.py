"""/v1/rerank: the order and the scores of `LLM.rank`, limits, keys, and one-line errors; prompts of /v1/embeddings."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.llm import LLM
from tests.e2e.test_sentence import PROMPTS, write_modules
from tests.server.harness import PATIENT, Running
from tests.server.key_principals import ALICE, http
from tests.server.test_principals import quota
from tests.tiny_rerankers import write_cross_encoder

QUERY, DOCUMENTS = "the water wheel", ["the mill stands by a river", "a wheel", "by", "water turns the wheel"]
ASKED = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ranker")
    write_cross_encoder(place, "bert")
    write_modules(place, {"pooling_mode": "mean"}, prompts={"prompts": PROMPTS}, hidden=64)
    return place


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with Running(folder, threads=1) as running:
        yield running


@pytest.fixture(scope="module")
def offline(folder: Path) -> Iterator[LLM]:
    with LLM(folder, threads=1) as llm:
        yield llm


def test_the_ranking_equals_that_of_the_llm(server: Running, offline: LLM) -> None:
    expected = offline.rank(QUERY, DOCUMENTS)
    answer = server.post("/v1/rerank", ASKED).json()
    made = [(one["index"], one["relevance_score"]) for one in answer["results"]]
    assert made == [(one.index, one.score) for one in expected]
    assert all(set(one) == {"index", "relevance_score"} for one in answer["results"])
    tokens = sum(len(one.token_ids) for one in expected)
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    objects = [{"text": text} for text in DOCUMENTS]
    few = server.post("/v1/rerank", {**ASKED, "documents": objects, "top_n": 2, "return_documents": True}).json()
    assert [one["document"]["text"] for one in few["results"]] == [DOCUMENTS[one.index] for one in expected[:2]]
    many = server.post("/v1/rerank", {**ASKED, "documents": DOCUMENTS * 20}).json()
    assert {one["index"] % 4: one["relevance_score"] for one in many["results"]} == dict(made)


@pytest.mark.parametrize(
    ("change", "status", "says", "field"),
    [
        ({"documents": []}, 400, "none of them empty", "documents"),
        ({"documents": ["a", ""]}, 400, "none of them empty", "documents"),
        ({"documents": [{"title": "a"}]}, 400, "title", None),
        ({"documents": "a"}, 400, "documents", None),
        ({"documents": ["a"] * 2049}, 400, "at most 2048 documents", "documents"),
        ({"documents": ["a wheel " * 300]}, 400, "shorten", "query"),
        ({"query": ""}, 400, "query is empty", "query"),
        ({"top_n": 0}, 400, "top_n must be 1 or more", "top_n"),
        ({"temperature": 1}, 400, "unknown field 'temperature'", None),
        ({"model": "gpt-99"}, 404, "is not served here", "model"),
    ],
)
def test_a_bad_request_is_refused(server: Running, change: dict[str, Any], status: int, says: str, field: str | None) -> None:
    answer = server.post("/v1/rerank", {**ASKED, **change})
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert says in error["message"]
    assert field is None or error["param"] == field


def test_limits_count_pairs(folder: Path, offline: LLM, tmp_path: Path) -> None:
    """A request costs the tokens of its pairs, the query in each of them, and is refused before one of them runs."""
    pairs = {one.index: len(one.token_ids) for one in offline.rank(QUERY, DOCUMENTS)}
    tokens, cheapest = sum(pairs.values()), min(pairs, key=pairs.__getitem__)
    settings = {"keys": quota(tmp_path, tokens=2 * tokens + pairs[cheapest]), "limits": replace(PATIENT, inputs=8)}
    with Running(folder, threads=1, **settings) as server, http(server, ALICE) as alice:

        def ask(*documents: str) -> tuple[int, str]:
            response = alice.post("/v1/rerank", json={**ASKED, "documents": documents})
            return response.status_code, response.json().get("error", {}).get("message", "")

        status, message = ask(*DOCUMENTS, *DOCUMENTS, "a")
        assert (status, "at most 8 documents in a request, not 9" in message) == (400, True)
        assert ask(*DOCUMENTS, *DOCUMENTS)[0] == 200
        status, message = ask(*DOCUMENTS)
        assert (status, f"has used {2 * tokens}" in message) == (429, True)
        assert ask(DOCUMENTS[cheapest])[0] == 200
        assert ask("a")[0] == 429


def test_a_model_without_a_head_is_refused(folder: Path, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(server.llm.opened), "ranker", None)
    answer = server.post("/v1/rerank", ASKED)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "no head to rank with" in answer.json()["error"]["message"]


def test_prompts_of_embeddings(server: Running, offline: LLM) -> None:
    for field, name in (("prompt_name", "query"), ("input_type", "document")):
        expected = offline.embed(DOCUMENTS, prompt_name=name)
        asked = {"model": "tiny", "input": DOCUMENTS, field: name, "encoding_format": "float"}
        answer = server.post("/v1/embeddings", asked).json()
        assert [one["embedding"] for one in answer["data"]] == [one.values for one in expected]
        assert answer["usage"]["prompt_tokens"] == sum(len(one.token_ids) for one in expected)
    for change, says in (
        ({"prompt_name": "x"}, "no prompt 'x'; it has query, passage"),
        ({"prompt_name": "query", "input": [5, 6]}, "needs texts, not token ids"),
        ({"prompt_name": "query", "input_type": "query"}, "give one of them"),
    ):
        answer = server.post("/v1/embeddings", {"model": "tiny", "input": "a", **change})
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]
