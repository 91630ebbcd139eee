"""A protocol of the server is one file and a row: a toy that is held to what all others are held to."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from schemathesis import GenerationMode

from headrace.server import app
from headrace.server.settings import Limits
from tests.house.lines import LinesRequest, lines
from tests.server.harness import Running
from tests.server.test_bad_inputs import BOTH, check
from tests.server.test_fuzz import SMALL, _ask, _fuzz, _strategies
from tests.server.test_guard import test_every_route_needs_the_key as needs_the_key
from tests.server.test_large_bodies import test_every_list_text_and_mapping_is_bounded as is_bounded
from tests.server.test_large_bodies import test_unknown_fields_by_the_thousand_are_refused_for_the_first as tells_the_first
from tests.tiny_files import write_tiny_gguf
from tests.unit.test_imports import SOURCES, wrong_imports

PATH, KEY = "/v1/lines", "secret-of-lines"
ROW = app.Protocol(PATH, LinesRequest, lines, "prompt", {"text/plain": {"schema": {"type": "string"}}})
BODY = {"model": "tiny", "prompt": "The mill", "max_tokens": 6, "n": 3, "seed": 1}
FEW = 6  # of each kind: that requests of this protocol are made up at all; tests/server/test_fuzz.py makes up more


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


def test_it_could_lie_in_the_room_of_the_server() -> None:
    source, module = Path(__file__).with_name("lines.py").read_text(), "headrace.server.lines"
    assert wrong_imports(module, source, {*SOURCES, module}) == []
    assert wrong_imports("headrace.text.lines", source, {*SOURCES, module}), "any room would do"


def test_it_answers_as_the_others_do(served: Running) -> None:
    answer = served.post(PATH, BODY)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    choices = served.post("/v1/completions", BODY).json()["choices"]
    assert answer.text.split("\n") == [" ".join(one["text"].splitlines()) for one in choices]
    assert len(set(answer.text.split("\n"))) > 1
    described = served.http.get("/openapi.json").json()["paths"][PATH]["post"]["responses"]["200"]
    assert set(described["content"]) == {"text/plain"}


@pytest.mark.parametrize(("field", "value", "says"), BOTH)
def test_what_others_refuse_it_refuses(served: Running, field: str, value: Any, says: str) -> None:
    body = {"model": "tiny", "prompt": "The mill", "max_tokens": 4}
    check(served, PATH, body | {field: value}, field, says)


def test_its_body_is_bounded() -> None:
    is_bounded(LinesRequest)
    tells_the_first(LinesRequest)


def test_it_lies_behind_the_guard() -> None:
    with Running("no-model", begin=False, key=KEY, limits=Limits(body=2000)) as locked:
        needs_the_key(locked, "POST", PATH)
        assert locked.http.post(PATH, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415
        assert locked.post(PATH, {**BODY, "prompt": "x" * 3000}).status_code == 413
        assert locked.post("/v1/completions", {**BODY, "prompt": "x" * 3000}).status_code == 413


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_meets_a_mistake_of_the_server(tiny: Path, mode: GenerationMode) -> None:
    seen: list[int] = []
    with Running(tiny, limits=SMALL, max_model_len=64) as small, requests.Session() as session:
        session.trust_env = False
        document = small.http.get("/openapi.json").json()
        document["components"]["schemas"]["LinesRequest"]["properties"]["model"] = {"enum": ["tiny"]}
        operation = schemathesis.openapi.from_dict(document)[PATH]["POST"]
        for strategy in _strategies(operation, mode):
            _fuzz(strategy, FEW, lambda case: seen.append(_ask(small, session, document, None, case)))
        assert small.llm.restarts == 0
    assert len(seen) >= FEW
    assert mode is GenerationMode.NEGATIVE or 200 in seen


def test_without_its_row_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "PROTOCOLS", app.PROTOCOLS[:-1])
    with Running("no-model", begin=False) as without:
        answer = without.post(PATH, BODY)
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, "there is nothing at this path")
        assert PATH not in without.http.get("/openapi.json").json()["paths"]
