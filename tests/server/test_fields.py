"""Every field of OpenAI's document for our endpoints is read, or refused by name with a 400; none is ignored silently."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.places import data_path
from tests.server.harness import Running

TALK = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
EXPIRES = {"anchor": "created_at", "seconds": 3600}
REFUSED = object()  # follows a value: it must be a 400 that names the field

# By endpoint: what a request needs, and for every field a value; a list of two whose second is REFUSED for what is refused.
BODIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/completions": (
        {"model": "tiny", "prompt": "hi", "max_tokens": 1},
        {
            "model": "tiny", "prompt": [1, 2], "max_tokens": 2, "best_of": 2, "echo": True, "frequency_penalty": 0.5,
            "logit_bias": {"5": 1}, "logprobs": 2, "n": 2, "presence_penalty": 0.5, "seed": 7, "stop": ["x"], "stream": True,
            "stream_options": [{"include_usage": True}, REFUSED], "suffix": ["x", REFUSED], "temperature": 0.3, "top_p": 0.9,
            "user": "me",
        },
    ),
    "/chat/completions": (
        {"model": "tiny", "messages": TALK, "max_tokens": 1},
        {
            "model": "tiny", "messages": TALK, "max_tokens": 2, "max_completion_tokens": 1, "frequency_penalty": 0.5,
            "audio": [{"voice": "alloy", "format": "wav"}, REFUSED], "function_call": [{"name": "f"}, REFUSED],
            "functions": [[FUNCTION], REFUSED], "logit_bias": {"5": 1}, "logprobs": True, "metadata": {"a": "b"},
            "modalities": [["audio"], REFUSED], "moderation": [{"model": "m"}, REFUSED], "n": 2, "parallel_tool_calls": False,
            "prediction": {"type": "content", "content": "x"}, "presence_penalty": 0.5, "prompt_cache_key": "k",
            "prompt_cache_options": {"mode": "auto"}, "prompt_cache_retention": "24h", "reasoning_effort": "low",
            "response_format": SCHEMA, "safety_identifier": "s", "seed": 7, "service_tier": "auto", "stop": "x", "store": False,
            "stream": True, "stream_options": [{"include_usage": True}, REFUSED], "temperature": 0.3, "tool_choice": "auto",
            "tools": [{"type": "function", "function": FUNCTION}], "top_logprobs": [2, REFUSED], "top_p": 0.9, "user": "me",
            "verbosity": "low", "web_search_options": [{}, REFUSED],
        },
    ),
    "/embeddings": (
        {"model": "tiny", "input": "hi"},
        {"model": "tiny", "input": ["a", "b"], "dimensions": 8, "encoding_format": "base64", "user": "me"},
    ),
    "/responses": (
        {"model": "tiny", "input": "hi", "max_output_tokens": 1, "store": False},
        {
            "model": "tiny", "input": TALK, "max_output_tokens": 2, "store": True, "background": [True, REFUSED],
            "context_management": [[{"type": "compaction"}], REFUSED], "conversation": ["c", REFUSED],
            "include": ["message.output_text.logprobs"], "instructions": "be brief", "max_tool_calls": [1, REFUSED],
            "metadata": {"a": "b"}, "moderation": [{"model": "m"}, REFUSED], "parallel_tool_calls": False,
            "previous_response_id": ["resp_none", REFUSED], "prompt": [{"id": "p"}, REFUSED], "prompt_cache_key": "k",
            "prompt_cache_options": {"mode": "auto"}, "prompt_cache_retention": "24h", "reasoning": {"effort": "low"},
            "safety_identifier": "s", "service_tier": "auto", "stream": True,
            "stream_options": [{"include_obfuscation": True}, REFUSED], "temperature": 0.3,
            "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [{"type": "function", **FUNCTION}],
            "top_logprobs": 2, "top_p": 0.9, "truncation": ["auto", REFUSED], "user": "me",
        },
    ),
    "/batches": (
        {"input_file_id": "", "endpoint": "/v1/completions", "completion_window": "24h"},
        {
            "input_file_id": ["file-none", REFUSED], "endpoint": "/v1/completions", "completion_window": ["1h", REFUSED],
            "metadata": {"a": "b"}, "output_expires_after": EXPIRES,
        },
    ),
}  # fmt: skip
QUERIES = {
    "/files": {"purpose": "batch", "limit": "1", "order": "asc", "after": "file-none"},
    "/batches": {"limit": "1", "after": "batch_none"},
    "/responses/{response_id}": dict.fromkeys(("include", "stream", "starting_after", "include_obfuscation")),
    "/responses/{response_id}/input_items": {"limit": "1", "order": "asc", "after": "item_0", "include": None},
}  # None: refused


@cache
def document() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: dict[str, Any] = yaml.load(data_path("openai/openapi.yaml").read_text("utf-8"), Loader=loader)  # noqa: S506 - both are safe
    return found


def properties(schema: dict[str, Any]) -> set[str]:
    """The names of an object's fields, those of the parts it is made of included."""
    if "$ref" in schema:
        return properties(document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    parts = [part for kind in ("allOf", "anyOf", "oneOf") for part in schema.get(kind, [])]
    return set(schema.get("properties", {})).union(*map(properties, parts))


@pytest.fixture(scope="module")
def server(wide: Running) -> Running:
    return wide


@pytest.mark.parametrize("path", BODIES)
def test_every_field_of_the_document_is_here(path: str) -> None:
    content = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    assert properties(content["schema"]) == set(BODIES[path][1])


@pytest.mark.parametrize("path", QUERIES)
def test_every_parameter_of_the_document_is_here(path: str) -> None:
    named = {each["name"] for each in document()["paths"][path]["get"]["parameters"] if each["in"] == "query"}
    assert named == set(QUERIES[path])


@pytest.mark.parametrize("path", BODIES)
def test_a_field_is_taken_or_named(server: Running, path: str) -> None:
    least, fields = BODIES[path]
    if path == "/batches":
        line = b'{"custom_id": "a", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "hi", "max_tokens": 1}}'
        least = {**least, "input_file_id": server.openai.files.create(file=("a", line), purpose="batch").id}
    for name, given in fields.items():
        refused = isinstance(given, list) and given[-1] is REFUSED
        body = {**least, name: given[0] if refused else given}
        if name == "max_completion_tokens":
            del body["max_tokens"]
        answer = server.post(f"/v1{path}", body)
        if not refused:
            assert answer.status_code == 200, (name, answer.text)
            continue
        assert answer.status_code in (400, 404), (name, answer.status_code)
        assert answer.json()["error"]["param"] == name, (name, answer.text)


@pytest.mark.parametrize("path", QUERIES)
def test_a_parameter_is_taken_or_named(server: Running, path: str) -> None:
    kept = server.post("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 1}).json()["id"]
    for name, value in QUERIES[path].items():  # type: ignore[attr-defined]
        answer = server.http.get(f"/v1{path.format(response_id=kept)}", params={name: value or "x"})
        assert answer.status_code == (400 if value is None else 200), (name, answer.text)
        assert value is not None or answer.json()["error"]["param"] == name


def test_a_field_is_taken_with_the_field_that_it_needs(server: Running) -> None:
    """What was refused alone, since it goes with another."""
    chat = BODIES["/chat/completions"][0]
    for path, body in (
        ("completions", {**BODIES["/completions"][0], "stream": True, "stream_options": {"include_usage": True}}),
        ("chat/completions", {**chat, "stream": True, "stream_options": {"include_usage": True}}),
        ("chat/completions", {**chat, "logprobs": True, "top_logprobs": 2}),
        ("responses", {**BODIES["/responses"][0], "stream": True, "stream_options": {"include_obfuscation": False}}),
    ):
        assert server.post(f"/v1/{path}", body).status_code == 200, body


def test_a_file_expires_after_the_requested_seconds(server: Running, tmp_path: Path) -> None:
    """By the names that the document has for the form."""
    names = properties(document()["paths"]["/files"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"])
    assert names == {"file", "purpose", "expires_after"}
    form = {"purpose": "user_data", "expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    made = server.http.post("/v1/files", files={"file": ("a", b"x")}, data=form).json()
    assert made["expires_at"] == made["created_at"] + 7200
