"""What the OpenAPI document says of answers. Requests are described by their own fields."""

from typing import Any

import msgspec
from fastapi import FastAPI

from headrace.server.answers import Chat, Completion, Model

REF = "#/components/schemas/{name}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _object(kind: str | None, required: dict[str, Any], more: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object of the protocol, whose `object` is `kind`."""
    fields = {**({"object": {"const": kind}} if kind else {}), **required}
    return {"type": "object", "required": list(fields), "properties": {**fields, **(more or {})}}


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT, NUMBER, TRUTH = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
MAYBE_TEXT, MAYBE_NUMBER = {"type": ["string", "null"]}, {"type": ["integer", "null"]}
FILE = _object(
    "file",
    {"id": TEXT, "bytes": NUMBER, "created_at": NUMBER, "filename": TEXT, "purpose": TEXT, "status": TEXT},
    {"expires_at": MAYBE_NUMBER},
)
BATCH = _object(
    "batch",
    {
        "id": TEXT,
        "endpoint": TEXT,
        "input_file_id": TEXT,
        "completion_window": TEXT,
        "status": {"enum": ["failed", "in_progress", "completed", "expired", "cancelling", "cancelled"]},
        "created_at": NUMBER,
        "request_counts": _object(None, {"total": NUMBER, "completed": NUMBER, "failed": NUMBER}),
    },
    {"output_file_id": MAYBE_TEXT, "error_file_id": MAYBE_TEXT},
)
RESPONSE = _object(
    "response",
    {
        "id": TEXT,
        "created_at": NUMBER,
        "model": TEXT,
        "status": {"enum": ["completed", "incomplete", "failed", "in_progress"]},
        "output": _array({"type": "object", "required": ["id", "type"]}),
        "usage": {"type": ["object", "null"]},
    },
)
EMBEDDING = _object("embedding", {"index": NUMBER, "embedding": {"oneOf": [{"type": "string"}, _array({"type": "number"})]}})


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return _object("list", {"data": _array(item)})


def _deleted(kind: str) -> dict[str, Any]:
    return _object(kind, {"id": TEXT, "deleted": TRUTH})


def _ref(kind: type) -> dict[str, Any]:
    return {"$ref": REF.format(name=kind.__name__)}


def _content(schema: dict[str, Any], *, streams: bool = False) -> dict[str, Any]:
    """Of an answer in JSON, and in events where it may be streamed."""
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    return content | ({"text/event-stream": {"schema": {"type": "string"}}} if streams else {})


COMPLETION, CHAT = _content(_ref(Completion), streams=True), _content(_ref(Chat), streams=True)
EMBEDDINGS = _content(_object("list", {"data": _array(EMBEDDING), "model": TEXT, "usage": {"type": "object"}}))
# Method and path -> what a 200 holds.
ANSWERS: dict[tuple[str, str], dict[str, Any]] = {
    ("get", "/v1/models"): _list(_ref(Model)),
    ("get", "/v1/models/{name}"): _ref(Model),
    ("post", "/v1/responses"): RESPONSE,
    ("get", "/v1/responses/{name}"): RESPONSE,
    ("delete", "/v1/responses/{name}"): _deleted("response"),
    ("get", "/v1/responses/{name}/input_items"): _list({"type": "object"}),
    ("post", "/v1/files"): FILE,
    ("get", "/v1/files"): _list(FILE),
    ("get", "/v1/files/{name}"): FILE,
    ("delete", "/v1/files/{name}"): _deleted("file"),
    ("post", "/v1/batches"): BATCH,
    ("get", "/v1/batches"): _list(BATCH),
    ("get", "/v1/batches/{name}"): BATCH,
    ("post", "/v1/batches/{name}/cancel"): BATCH,
    ("post", "/tokenize"): _object(None, {"tokens": _array(NUMBER), "count": NUMBER, "max_model_len": MAYBE_NUMBER}),
    ("post", "/detokenize"): _object(None, {"prompt": TEXT}),
    ("post", "/page/render"): _object(None, {"html": TEXT}),
    ("get", "/live"): _object(None, {"status": TEXT}),
    ("get", "/ready"): _object(None, {"status": TEXT}),
    ("get", "/version"): _object(None, {"version": TEXT}),
    ("get", "/health"): _object(None, {"status": TEXT, "detail": TEXT, "restarts": NUMBER}),
}
STREAMS = {("post", "/v1/responses")}
OTHER = {("get", "/metrics"): "text/plain", ("get", "/v1/files/{name}/content"): "application/octet-stream"}


def describe(app: FastAPI, protocols: dict[str, dict[str, Any]]) -> None:
    """Complete the document: what answers and errors look like, and the key. `protocols`: what answers on their paths hold."""
    document = app.openapi()
    _, components = msgspec.json.schema_components((Completion, Chat, Model), ref_template=REF)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= {**components, "Error": ERROR}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    error = {"content": {"application/json": {"schema": {"$ref": REF.format(name="Error")}}}}
    contents = {("post", path): content for path, content in protocols.items()}
    contents |= {place: _content(schema, streams=place in STREAMS) for place, schema in ANSWERS.items()}
    contents |= {place: {kind: {"schema": {"type": "string"}}} for place, kind in OTHER.items()}
    nothing = _content({"type": "object"})
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation["responses"] = {
                "200": {"description": "The answer.", "content": contents.get((method, path), nothing)},
                "4XX": {"description": "What is wrong with the request, and what to change.", **error},
                "503": {"description": "Not now: Retry-After says when to come back.", **error},
            }
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
