"""Requests that cost little to send: none of them asks another host, keeps others waiting, or fills the memory."""

import json
from typing import Any

import pytest

from tests.server.harness import Running
from tests.trap import trap

TALK: Any = [{"role": "user", "content": "hi"}]
OUTWARD = [
    {"oneOf": [{"const": 1}, {"$dynamicRef": "URL"}]},
    {"oneOf": [{"const": 1}, {"not": {"$dynamicRef": "URL"}, "multipleOf": 7}]},
    {"$ref": "URL"},
]


def as_tool(schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]}


def as_form(schema: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}}


@pytest.mark.parametrize("schema", OUTWARD, ids=json.dumps)
@pytest.mark.parametrize("door", [as_tool, as_form])
def test_no_schema_of_a_request_makes_the_server_ask_another_host(server: Running, schema: Any, door: Any) -> None:
    """Nor any of its processes: the trap hears all of them."""
    with trap() as (url, got):
        body = {"model": "tiny", "messages": TALK, "max_tokens": 4, **json.loads(json.dumps(door(schema)).replace("URL", url))}
        answer = server.post("/v1/chat/completions", body)
    assert got == []
    assert answer.status_code == 400
    assert "only references within it" in answer.json()["error"]["message"]
