"""Answers in the OpenAPI document: a JSON schema, or a reference to the one that msgspec derives from a struct.

Schemas of requests all derive from structs.
"""

from typing import Any

from headrace.server.protocols.openai_types import Chat, Completion, Model

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
    {
        "index": NUMBER,
        "label": TEXT,
        "probabilities": {"type": "object", "additionalProperties": {"type": "number"}},
        "layers": NUMBER,
    },
    {"exits": _array({"type": "object"})},
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
    made: dict[str, Any] = {"application/json": {"schema": schema}}
    return made | ({"text/event-stream": {"schema": {"type": "string"}}} if streams else {})


def plain(kind: str) -> dict[str, Any]:
    """Content of an answer that is text of the media type `kind`, not JSON."""
    return {kind: {"schema": {"type": "string"}}}


COMPLETION_ANSWER, CHAT_ANSWER = content(ref(Completion), streams=True), content(ref(Chat), streams=True)
EMBEDDINGS = content(_object("list", {"data": _array(EMBEDDING), "model": TEXT, "usage": {"type": "object"}}))
CLASSES = content(_object("list", {"data": _array(CLASSIFICATION), "model": TEXT, "usage": {"type": "object"}}))
MODEL, MODELS = content(ref(Model)), content(_list(ref(Model)))
TOKENS = content(_object(None, {"tokens": _array(NUMBER), "count": NUMBER, "max_model_len": MAYBE_NUMBER}))
INPUT_TOKENS = content(_object("response.input_tokens", {"input_tokens": NUMBER}))
TOKENIZER = content(_object(None, {"tokenizer_class": TEXT, "bos_token": MAYBE_TEXT, "eos_token": MAYBE_TEXT}))
PROMPT, HTML = content(_object(None, {"prompt": TEXT})), content(_object(None, {"html": TEXT}))
STATUS, VERSION = content(_object(None, {"status": TEXT})), content(_object(None, {"version": TEXT}))
HEALTH = content(_object(None, {"status": TEXT, "detail": TEXT, "restarts": NUMBER}))
RESPONSES, ITEMS = content(RESPONSE, streams=True), content(_list({"type": "object"}))
FILES, BATCHES = content(_list(FILE)), content(_list(BATCH))
