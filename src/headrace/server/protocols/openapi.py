"""The OpenAPI document of the endpoints and of the structs in their requests and answers."""

import re
from typing import Any

import msgspec

from headrace import __version__
from headrace.server.http.limits_check import StrictStruct
from headrace.server.protocols.openai_types import Chat, Completion, Model
from headrace.server.protocols.routes import Content, Endpoint
from headrace.server.protocols.schemas import ERROR, REF, content, ref


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
    made: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{one.method.lower()}{one.path.replace(':path', '')}").strip("_"),
        "responses": {
            "200": {"description": "The answer.", "content": one.answer},
            "4XX": {"description": "What is wrong with the request, and what to change.", "content": error},
            "503": {"description": "Not now: Retry-After says when to come back.", "content": error},
        },
    }
    if parameters := [*_of_path(one.path), *_of_query(one.query)]:
        made["parameters"] = parameters
    if taken := _taken(one):
        made["requestBody"] = {"required": True, "content": taken}
    return made


def _taken(one: Endpoint) -> Content | None:
    return one.form if one.body is None else content(ref(one.body))


def _of_path(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _of_query(query: type[StrictStruct]) -> list[dict[str, Any]]:
    _, components = msgspec.json.schema_components((query,), ref_template=REF)
    fields = components[query.__name__]["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in fields.items()]
