"""The OpenAPI document: it is valid, its references resolve, and its schemas agree with the request structs."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import jsonschema_rs
import pytest
import schemathesis

from headrace.server.http.api_error import ApiError
from headrace.server.http.body_limits import read_body
from headrace.server.protocols import fields
from tests.server.harness import Running


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    with Running("no-model", begin=False) as running:
        yield running.http.get("/openapi.json").json()


def references(value: Any) -> Iterator[str]:
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if name == "$ref":
            yield inner
        yield from references(inner)


def test_it_is_a_document_of_openapi(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    schemathesis.openapi.from_dict(document).validate()
    broken = copy.deepcopy(document)
    broken["paths"]["/v1/files"]["get"]["parameters"][0].pop("in")
    with pytest.raises(jsonschema_rs.ValidationError):
        schemathesis.openapi.from_dict(broken).validate()


def test_every_reference_of_the_document_resolves(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    found = set(references(document))
    assert {f"#/components/schemas/{name}" for name in ("CompletionRequest", "StreamOptions", "Error")} <= found
    assert found <= {f"#/components/schemas/{name}" for name in schemas}
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(names) == len(set(names))


LEAST: dict[str, Any] = {"model": "m", "prompt": "a"}
EITHER: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"prompt": ["a", "b"]}, True),
    ({"prompt": [1, 2]}, True),
    ({"prompt": [[1], [2, 3]]}, True),
    ({"prompt": []}, True),
    ({"prompt": ["a", 1]}, False),
    ({"prompt": [[1], "a"]}, False),
    ({"prompt": [[1.5]]}, False),
    ({"prompt": ["a"] * 4097}, False),
    ({"prompt": [-1]}, False),
    ({"seed": -5}, True),
    ({"seed": 2**64 - 1}, True),
    ({"seed": -(2**63) - 1}, False),
    ({"seed": None}, True),
    ({"stop": ["a"]}, True),
    ({"stop": ["a"] * 65}, False),
    ({"stream_options": {"include_usage": True}}, True),
    ({"stream_options": {"include_obfuscation": False}}, True),
    ({"stream_options": {"include_obfuscation": True}}, False),
    ({"stream_options": {"more": 1}}, False),
    ({"logit_bias": {"5": 1}}, True),
    ({"logit_bias": {"5": "1"}}, False),
    ({"bad_words": [[1] * 65]}, False),
    ({"cache_salt": ""}, False),
    ({"deadline": 0}, False),
    ({"n": True}, False),
    ({"metadata": {str(at): at for at in range(65)}}, False),
    ({"early_stopping": "never"}, True),
    ({"unknown": 1}, False),
    ({"model": 5}, False),
]


@pytest.mark.parametrize(("more", "holds"), EITHER, ids=lambda value: json.dumps(value)[:40])
def test_the_document_allows_the_bodies_that_the_reader_accepts(
    document: dict[str, Any], more: dict[str, Any], holds: bool
) -> None:
    body = LEAST | more
    schema = {"$ref": "#/components/schemas/CompletionRequest", "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) == holds
    try:
        read_body(json.dumps(body).encode(), fields.CompletionRequest)
    except ApiError:
        assert not holds
    else:
        assert holds
