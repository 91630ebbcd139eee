"""Checks finished texts against JSON schemas, for the keywords that masks do not enforce."""

import json

from headrace.data.structured import ConstraintError, StructuredOutputs
from headrace.decoding.json_schema.prepare import prepare


def late_keywords(spec: StructuredOutputs) -> tuple[str, ...]:
    """Keywords of a JSON schema that only a finished text can be checked against. Raises ConstraintError."""
    return prepare(read_schema(spec.json)).late if spec.json is not None else ()


def why_broken(spec: StructuredOutputs, text: str) -> str:
    """Why a finished text does not fit its JSON schema; empty if it does. Patterns use Python's dialect and may take long: for
    clients' schemas call it in a process that can be stopped."""
    if spec.json is None:
        return ""
    from headrace.decoding.json_schema.checking import validator  # jsonschema

    schema = read_schema(spec.json)
    try:
        error = next(validator(schema).iter_errors(json.loads(text)), None)
    except Exception as problem:  # no JSON, a pattern Python does not know, a recursion without end
        return f"the output cannot be checked against its JSON schema ({type(problem).__name__})"
    if error is None:
        return ""
    place = "/".join(map(str, error.absolute_path)) or "the whole"
    return f"the output does not fit its JSON schema: {place[:100]} breaks {error.validator!r}"


def read_schema(text: str) -> dict[str, object]:
    """The parsed JSON of a schema. Raises ConstraintError."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"the JSON schema is not JSON ({error}); correct it") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ConstraintError("the JSON schema must be an object that something fits; correct it")
    return schema
