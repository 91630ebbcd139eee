"""Requests that the OpenAPI document allows, and others: none gets a 5xx (schemathesis)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from headrace.server.settings import Limits
from tests.server.harness import PATIENCE, Running, until
from tests.server.test_guard import ROUTES

EXAMPLES = {GenerationMode.POSITIVE: 10, GenerationMode.NEGATIVE: 4}  # of each operation, well-formed and not
MANY = 300
SMALL = Limits(n=2, max_tokens=3, prompts=4, choices=4, inputs=4, batch_lines=5, stored=1 << 20, body_seconds=5)
LEFT_OUT = {("GET", "/openapi.json"), ("GET", "/no/such/path")}
OPERATIONS = [(method, path) for method, path in ROUTES if (method, path) not in LEFT_OUT]


@pytest.fixture(scope="module")
def small(tiny: Path) -> Iterator[Running]:
    with Running(tiny, limits=SMALL, max_model_len=64) as running:
        yield running


@pytest.fixture(scope="module")
def document(small: Running) -> dict[str, Any]:
    found: dict[str, Any] = small.http.get("/openapi.json").json()
    return found


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as made:
        made.trust_env = False
        yield made


def test_every_answer_is_described(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert set(operation["responses"]) == {"200", "4XX", "503"}, (method, path)
            for content in operation["responses"]["200"]["content"].values():
                assert content["schema"] != {"type": "object"}, f"{method} {path} says nothing of its answer"


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_fuzzed_requests_cause_no_server_error(
    small: Running, document: dict[str, Any], session: requests.Session, mode: GenerationMode
) -> None:
    _fuzz_all(small, document, session, mode, EXAMPLES[mode])


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_many_fuzzed_requests_cause_no_server_error(
    small: Running, document: dict[str, Any], session: requests.Session, mode: GenerationMode
) -> None:
    _fuzz_all(small, document, session, mode, MANY)


def _fuzz_all(small: Running, document: dict[str, Any], session: requests.Session, mode: GenerationMode, examples: int) -> None:
    seen: list[int] = []
    for component in document["components"]["schemas"].values():  # else nearly every model would be an unknown one
        if component.get("properties", {}).get("model", {}).get("type") == "string":
            component["properties"]["model"] = {"enum": ["tiny"]}
    api = schemathesis.openapi.from_dict(document)
    for result in api.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()
        schema = operation.definition.raw["responses"]["200"]["content"].get("application/json", {}).get("schema")
        for strategy in _strategies(operation, mode):
            _fuzz(
                strategy, examples, lambda case, schema=schema: seen.append(_send_case(small, session, document, schema, case))
            )
    print({status: seen.count(status) for status in sorted(set(seen))})
    assert len(seen) >= examples * 10
    assert mode is GenerationMode.NEGATIVE or seen.count(200) > examples
    assert small.health()["status"] == "ready"
    assert small.llm.restarts == 0
    until(lambda: small.figure("num_requests_running") == 0)


def _strategies(operation: Any, mode: GenerationMode) -> list[Any]:
    """Well-formed requests always; ill-formed ones where there is anything that could be."""
    nothing = operation.body.is_empty() if hasattr(operation.body, "is_empty") else not list(operation.body)
    plain = nothing and not list(operation.query) and not list(operation.path_parameters)
    return [] if mode is GenerationMode.NEGATIVE and plain else [operation.as_strategy(generation_mode=mode)]


def _fuzz(strategy: Any, examples: int, work: Callable[[Any], None]) -> None:
    @hypothesis.settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=strategy)
    def run_case(case: Any) -> None:
        work(case)

    run_case()


def _send_case(server: Running, session: requests.Session, document: dict[str, Any], schema: Any, case: Any) -> int:
    """The status of one request, whose answer is as it should be."""
    response = case.call(base_url=server.base, session=session, timeout=PATIENCE)
    _check(response, document, schema)
    status: int = response.status_code
    return status


def _check(response: Any, document: dict[str, Any], schema: dict[str, Any] | None) -> None:
    status, text = response.status_code, response.content.decode("utf-8", "replace")
    if status >= 500:
        assert status == 503, text
        assert int(response.headers["retry-after"][0]) > 0
    kind = (response.headers.get("content-type") or [""])[0]
    if status >= 400 and text and kind.startswith("application/json"):
        jsonschema.validate(response.json(), document["components"]["schemas"]["Error"])
        for told in ("Traceback", "/src/", "/tmp/", "site-packages", "0x7f"):
            assert told not in text
    elif status == 200 and kind.startswith("application/json") and schema is not None:
        jsonschema.validate(response.json(), {**schema, "components": document["components"]})
