"""Two spellings of one value: null for an unknown field that is absent, and 5.0 for the integer 5.

The types of a request decide where that holds. Inside data (schemas, metadata, template variables) nothing changes.
"""

import functools
from collections.abc import Sequence
from typing import Any

from msgspec import inspect

MOST_FIELDS = 1024  # of an object that is looked through; no request has as many


@functools.cache
def type_of(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def normalize(value: Any, kind: inspect.Type) -> Any:
    """A decoded value without the unknown fields that are null, and with integers where `kind` has integers."""
    if isinstance(kind, inspect.Metadata):  # a type with more to say in the OpenAPI document
        kind = kind.type
    match kind:
        case inspect.StructType() if isinstance(value, dict) and len(value) <= MOST_FIELDS:
            known = {one.encode_name: one.type for one in kind.fields}
            kept = {name: inner for name, inner in value.items() if name in known or inner is not None}
            return {name: normalize(inner, known[name]) if name in known else inner for name, inner in kept.items()}
        case inspect.UnionType():
            return _tidied_union(value, [one.type if isinstance(one, inspect.Metadata) else one for one in kind.types])
        case inspect.IntType() if type(value) is float and value.is_integer():
            return int(value)
        case inspect.ListType() if isinstance(value, list):
            return [normalize(inner, kind.item_type) for inner in value]
        case inspect.DictType() if isinstance(value, dict) and not isinstance(kind.value_type, inspect.AnyType):
            return {name: normalize(inner, kind.value_type) for name, inner in value.items()}
    return value


def _tidied_union(value: Any, kinds: Sequence[inspect.Type]) -> Any:
    wanted: Any
    match value:
        case float():
            wanted = () if any(isinstance(one, inspect.FloatType) for one in kinds) else inspect.IntType
        case list():
            wanted = inspect.ListType
        case dict():
            wanted = (inspect.StructType, inspect.DictType)
        case _:
            return value
    inner = next((one for one in kinds if isinstance(one, wanted)), None)
    return value if inner is None else normalize(value, inner)
