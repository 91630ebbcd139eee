"""Reference of the HTTP endpoints and their fields, from the OpenAPI document that a server returns."""

from collections.abc import Iterator
from typing import Any

from headrace.data.fields import declared
from headrace.data.params import SamplingParams
from tests.pages import wrapped
from tests.server.harness import Running

# Fields of every request that generates text; the page of sampling parameters describes them.
SAMPLING = {one.flat for one in declared(SamplingParams)}
# Media types of answers, in words.
MEDIA = {
    "application/json": "JSON",
    "text/event-stream": "event stream",
    "text/plain": "text",
    "application/octet-stream": "the file",
}
WIDEST = 2**31 - 1


def text() -> str:
    with Running("no-model", begin=False) as running:
        document = running.http.get("/openapi.json").json()
    paths, schemas = document["paths"], document["components"]["schemas"]
    parts = [endpoints(paths), "## Query and form fields", *parameters(paths), "## Objects", *objects(schemas)]
    return "\n\n".join(parts)


def endpoints(paths: dict[str, Any]) -> str:
    """All endpoints, with the object in the body and the kind of the answer."""
    rows = ["| endpoint | body | answer |", "|---|---|---|"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            bodies = operation.get("requestBody", {}).get("content", {})
            taken = ", ".join(typed(one["schema"]) if "$ref" in one["schema"] else f"`{kind}`" for kind, one in bodies.items())
            answers = " or ".join(MEDIA[kind] for kind in operation["responses"]["200"]["content"])
            rows.append(f"| `{method.upper()} {path}` | {taken} | {answers} |")
    return "\n".join(rows)


def parameters(paths: dict[str, Any]) -> Iterator[str]:
    """The fields of a query or a form."""
    for path, methods in paths.items():
        for method, operation in methods.items():
            query = {one["name"]: one["schema"] for one in operation.get("parameters", ()) if one["in"] == "query"}
            forms = [one["schema"] for one in operation.get("requestBody", {}).get("content", {}).values()]
            for schema in ({"properties": query}, *forms):
                if schema.get("properties"):
                    yield f"### {method.upper()} {path}"
                    yield table(schema["properties"], schema.get("required", []))


def objects(schemas: dict[str, Any]) -> Iterator[str]:
    """The objects in requests and answers."""
    for name, schema in schemas.items():
        yield f"### {name}"
        if about := schema.get("description"):
            yield wrapped(" ".join(about.split()))
        fields = schema.get("properties", {})
        own = {field: one for field, one in fields.items() if field not in SAMPLING or len(fields.keys() & SAMPLING) < 20}
        if len(own) < len(fields):
            yield "The [sampling parameters](sampling.md), and:"
        yield table(own, schema.get("required", []))


def table(fields: dict[str, Any], required: list[str]) -> str:
    """A table of fields."""
    rows = ["| field | type | default |", "|---|---|---|"]
    for name, schema in fields.items():
        preset = "required" if name in required else str(schema.get("default", "") or "").lower()
        rows.append(f"| `{name}` | {typed(schema).replace('|', '&#124;')} | {preset} |")
    return "\n".join(rows)


def typed(schema: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if found := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(typed(one) for one in found if one.get("type") != "null"))
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind, most = schema.get("type", "any"), schema.get("maxLength", schema.get("maxItems", schema.get("maxProperties")))
    limit = "" if most is None else f", at most {most:,}"
    if kind == "array":
        return f"list of {typed(schema.get('items', {}))}{limit}"
    if kind in ("integer", "number"):
        return kind + bounds(schema)
    return {"string": "text", "boolean": "true, false"}.get(kind, kind) + limit


def bounds(schema: dict[str, Any]) -> str:
    """The range of a number, if it is narrower than 32 bits."""
    least, most = schema.get("minimum"), schema.get("maximum")
    parts = [f"≥ {least:,}"] if least is not None and least > -WIDEST - 1 else []
    parts += [f"≤ {most:,}"] if most is not None and most < WIDEST else []
    return f", {', '.join(parts)}" if parts else ""
