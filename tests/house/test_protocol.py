"""A protocol of the server is one file and a row: an example that passes the tests that all protocols pass."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from schemathesis import GenerationMode

from headrace.server import app
from headrace.server.settings import Limits
from tests.house.lines import LINES, LinesRequest, LinesWriter, one_line
from tests.server.harness import Running
from tests.server.test_bad_inputs import BOTH, check
from tests.server.test_fuzz import SMALL, _fuzz, _send_case, _strategies
from tests.server.test_guard import test_every_route_needs_the_key as needs_the_key
from tests.server.test_large_bodies import test_every_list_text_and_mapping_is_bounded as is_bounded
from tests.server.test_large_bodies import test_unknown_fields_by_the_thousand_are_refused_for_the_first as tells_the_first
from tests.tiny_files import write_tiny_gguf
from tests.unit.test_imports import SOURCES, wrong_imports

PATH, KEY = "/v1/lines", "secret-of-lines"
ROW = app.Protocol(PATH, LinesRequest, LINES, "prompt", {"text/plain": {"schema": {"type": "string"}}})
BODY = {"model": "tiny", "prompt": "The mill", "max_tokens": 6, "n": 3, "seed": 1}
# Requests of each kind. They show that requests of this protocol can be generated; tests/server/test_fuzz.py sends more.
FEW = 6


@pytest.fixture(scope="module", autouse=True)
def row() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "PROTOCOLS", (*app.PROTOCOLS, ROW))
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("lines") / "tiny.gguf")


@pytest.fixture(scope="module")
def served(tiny: Path) -> Iterator[Running]:
    with Running(tiny) as running:
        yield running


def test_it_obeys_the_import_rules_of_the_server() -> None:
    source, module = Path(__file__).with_name("lines.py").read_text(), "headrace.server.lines"
    assert wrong_imports(module, source, {*SOURCES, module}) == []
    assert wrong_imports("headrace.text.lines", source, {*SOURCES, module}), "no import rule applies"


def test_it_has_the_text_of_a_completion(served: Running) -> None:
    answer = served.post(PATH, BODY)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    choices = served.post("/v1/completions", BODY).json()["choices"]
    assert answer.text.split("\n") == [one_line(choice["text"]) for choice in choices]
    assert len(set(answer.text.split("\n"))) > 1
    described = served.http.get("/openapi.json").json()["paths"][PATH]["post"]["responses"]["200"]
    assert set(described["content"]) == {"text/plain"}


def streamed(served: Running) -> list[str]:
    """The text of each answer, put together from the events of a stream."""
    texts = [""] * BODY["n"]
    *events, done, rest = served.post(PATH, {**BODY, "stream": True}).text.split("\n\n")
    for event in events:
        index, text = event.removeprefix("data: ").split(" ", 1)
        texts[int(index)] += text
    assert (done, rest) == ("data: [DONE]", "")
    return texts


def test_a_stream_has_the_text_of_the_complete_answer(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a writer that drops the last event of each answer."""
    complete = served.post(PATH, BODY).text.split("\n")
    assert streamed(served) == complete
    chunks = LinesWriter.chunks
    monkeypatch.setattr(LinesWriter, "chunks", lambda *given: () if given[1].finish_reason else chunks(*given))
    assert streamed(served) != complete


@pytest.mark.parametrize(("field", "value", "says"), BOTH)
def test_it_refuses_the_fields_that_other_protocols_refuse(served: Running, field: str, value: Any, says: str) -> None:
    body = {"model": "tiny", "prompt": "The mill", "max_tokens": 4}
    check(served, PATH, body | {field: value}, field, says)


def test_its_fields_are_bounded() -> None:
    is_bounded(LinesRequest)
    tells_the_first(LinesRequest)


def test_it_needs_a_key_and_small_bodies() -> None:
    with Running("no-model", begin=False, key=KEY, limits=Limits(body=2000)) as locked:
        needs_the_key(locked, "POST", PATH)
        assert locked.http.post(PATH, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
        assert locked.post(PATH, {**BODY, "prompt": "x" * 3000}).status_code == 413
        assert locked.post("/v1/completions", {**BODY, "prompt": "x" * 3000}).status_code == 413


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_generated_request_causes_an_internal_error(tiny: Path, mode: GenerationMode) -> None:
    seen: list[int] = []
    with Running(tiny, limits=SMALL, max_model_len=64) as small, requests.Session() as session:
        session.trust_env = False
        document = small.http.get("/openapi.json").json()
        document["components"]["schemas"]["LinesRequest"]["properties"]["model"] = {"enum": ["tiny"]}
        operation = schemathesis.openapi.from_dict(document)[PATH]["POST"]
        for strategy in _strategies(operation, mode):
            _fuzz(strategy, FEW, lambda case: seen.append(_send_case(small, session, document, None, case)))
        assert small.llm.restarts == 0
    assert len(seen) >= FEW
    assert mode is GenerationMode.NEGATIVE or 200 in seen


def test_without_its_row_the_path_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "PROTOCOLS", app.PROTOCOLS[:-1])
    with Running("no-model", begin=False) as without:
        answer = without.post(PATH, BODY)
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, "there is nothing at this path")
        assert PATH not in without.http.get("/openapi.json").json()["paths"]
