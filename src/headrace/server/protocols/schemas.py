"""The OpenAPI document of the endpoints, of the structs in their requests and of their answers.

Schemas of requests all derive from structs. An answer has a JSON schema, or a reference to one that msgspec derives.
"""

import re
from typing import Any

import msgspec

from headrace import __version__
from headrace.server.http.limits_check import StrictStruct
from headrace.server.protocols.openai_types import Chat, Completion, Model
from headrace.server.protocols.routes import Content, Endpoint

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
    """The schema of an object of the protocol whose field `object` is `kind`."""
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

CLASSIFICATION = _object(
    "classification",
    {"index": NUMBER, "layers": NUMBER},
    {
        "label": TEXT,
        "probabilities": {"type": "object", "additionalProperties": {"type": "number"}},
        "value": {"type": "number"},
        "exits": _array({"type": "object"}),
    },
)


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return _object("list", {"data": _array(item)})


def deleted(kind: str) -> dict[str, Any]:
    """Content of the answer to a deletion of an object of this kind."""
    return content(_object(kind, {"id": TEXT, "deleted": TRUTH}))


def ref(kind: type) -> dict[str, Any]:
    """Reference ("$ref") to the schema of a struct, which the OpenAPI document lists under "components"."""
    return {"$ref": REF.format(name=kind.__name__)}


def content(schema: dict[str, Any], *, streams: bool = False) -> dict[str, Any]:
    """Content of an answer by media type: JSON with this schema and, if it may be streamed, server-sent events."""
    media: dict[str, Any] = {"application/json": {"schema": schema}}
    return media | ({"text/event-stream": {"schema": {"type": "string"}}} if streams else {})


def plain(kind: str) -> dict[str, Any]:
    """Content of an answer that is text of the media type `kind`, not JSON."""
    return {kind: {"schema": {"type": "string"}}}


COMPLETION_ANSWER, CHAT_ANSWER = content(ref(Completion), streams=True), content(ref(Chat), streams=True)
EMBEDDINGS = content(_object("list", {"data": _array(EMBEDDING), "model": TEXT, "usage": {"type": "object"}}))
CLASSES = content(_object("list", {"data": _array(CLASSIFICATION), "model": TEXT, "usage": {"type": "object"}}))
RANKED = _object(None, {"index": NUMBER, "relevance_score": {"type": "number"}}, {"document": _object(None, {"text": TEXT})})
RANKING = content(_object("list", {"results": _array(RANKED), "model": TEXT, "usage": {"type": "object"}}))
MODEL, MODELS = content(ref(Model)), content(_list(ref(Model)))
OPERATED_MODEL = _object(
    "model",
    {
        "id": TEXT,
        "state": {"enum": ["loaded", "loading", "unloaded"]},
        "mode": {"enum": ["pinned", "on demand", "off"]},
        "aliases": _array(TEXT),
        "bytes": NUMBER,
        "progress": {"type": "number"},
        "requests": NUMBER,
        "waiting": NUMBER,
        "idle_seconds": {"type": ["number", "null"]},
        "failures": NUMBER,
    },
)
OPERATED, OPERATED_MODELS = content(OPERATED_MODEL), content(_list(OPERATED_MODEL))
TOKENS = content(_object(None, {"tokens": _array(NUMBER), "count": NUMBER, "max_model_len": MAYBE_NUMBER}))
INPUT_TOKENS = content(_object("response.input_tokens", {"input_tokens": NUMBER}))
TOKENIZER = content(_object(None, {"tokenizer_class": TEXT, "bos_token": MAYBE_TEXT, "eos_token": MAYBE_TEXT}))
PROMPT, HTML = content(_object(None, {"prompt": TEXT})), content(_object(None, {"html": TEXT}))
STATUS, VERSION = content(_object(None, {"status": TEXT})), content(_object(None, {"version": TEXT}))
HEALTH = content(_object(None, {"status": TEXT, "detail": TEXT, "restarts": NUMBER}))
RESPONSES, ITEMS = content(RESPONSE, streams=True), content(_list({"type": "object"}))
FILES, BATCHES = content(_list(FILE)), content(_list(BATCH))


TRANSCRIPTION = {
    "application/json": {
        "schema": _object(None, {"text": TEXT}, {"segments": _array({"type": "object"}), "usage": {"type": "object"}})
    },
    **plain("text/plain"),
    **plain("text/event-stream"),
}


def form_content(kind: type[StrictStruct]) -> Content:
    """Content of a multipart form: the fields of a struct, and a file."""
    (_,), components = msgspec.json.schema_components((kind,), ref_template=REF)
    schema = components[kind.__name__]
    properties = {"file": {"type": "string", "format": "binary"}, **_whole(schema["properties"], components)}
    return {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", *schema["required"]],
                "additionalProperties": False,
                "properties": properties,
            }
        }
    }


def _whole(schema: Any, components: dict[str, Any]) -> Any:
    """A schema with the objects that it names, because the document lists those of JSON bodies alone."""
    if isinstance(schema, list):
        return [_whole(one, components) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _whole(components[schema["$ref"].rpartition("/")[2]], components)
    return {name: _whole(one, components) for name, one in schema.items()}


def document(endpoints: list[Endpoint]) -> dict[str, Any]:
    """The document of all endpoints; static files are not in it."""
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        paths.setdefault(one.path.replace(":path}", "}"), {})[one.method.lower()] = _operation(one)
    bodies = [one.body for one in endpoints if one.body is not None]
    _, components = msgspec.json.schema_components((*bodies, Completion, Chat, Model), ref_template=REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(one: Endpoint) -> dict[str, Any]:
    error = content({"$ref": REF.format(name="Error")})
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{one.method.lower()}{one.path.replace(':path', '')}").strip("_"),
        "responses": {
            "200": {"description": "The answer.", "content": one.answer},
            "4XX": {"description": "What is wrong with the request, and what to change.", "content": error},
            "503": {"description": "Not now: Retry-After says when to come back.", "content": error},
        },
    }
    if parameters := [*_of_path(one.path), *_of_query(one.query)]:
        operation["parameters"] = parameters
    if taken := _taken(one):
        operation["requestBody"] = {"required": True, "content": taken}
    return operation


def _taken(one: Endpoint) -> Content | None:
    return one.form if one.body is None else content(ref(one.body))


def _of_path(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _of_query(query: type[StrictStruct]) -> list[dict[str, Any]]:
    _, components = msgspec.json.schema_components((query,), ref_template=REF)
    fields = components[query.__name__]["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in fields.items()]
