"""Validators of finished values, by the jsonschema library. Imported when needed, as its libraries take long to import."""

from typing import Any

import jsonschema
from referencing import Registry

# References stay within the schema. The default would fetch them, even from files.
NOWHERE: Registry[Any] = Registry()


def validator(schema: Any, of: Any = None) -> Any:
    """A validator for a schema, in the draft that it, or the schema `of` that contains it, names."""
    kind = jsonschema.validators.validator_for(schema if of is None else of, jsonschema.Draft202012Validator)
    return kind(schema, registry=NOWHERE)
