"""Values beside schemas, as jsonschema has them. Loaded where one is checked: its libraries take long to import."""

from typing import Any

import jsonschema
from referencing import Registry

# What a schema refers to is in it, or nowhere. The default would fetch it, be it a file.
NOWHERE: Registry[Any] = Registry()


def validator(schema: Any, of: Any = None) -> Any:
    """What checks values against a schema, in the draft that it, or the schema it is a part `of`, names."""
    kind = jsonschema.validators.validator_for(schema if of is None else of, jsonschema.Draft202012Validator)
    return kind(schema, registry=NOWHERE)
