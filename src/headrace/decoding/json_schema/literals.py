"""JSON values and types as schemas see them, and regexes of plain strings."""

from collections.abc import Iterable
from typing import Any

TYPES = frozenset({"null", "boolean", "object", "array", "string", "number"})  # an integer is a number
ANY_TEXT = "(?s:.)*"
MAX_TEXT = 4000  # characters of strings in one complement
MAX_WHOLE = 1e15  # beyond it adding 0.25 does not change a float


def type_of(value: Any) -> str:
    """The JSON type of a value; integers are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def types_of(schema: Any) -> frozenset[str]:
    """The types that `type`, `enum` and `const` of a schema allow; "integer" counts as number."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, dict):
        return TYPES
    types = TYPES
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        types &= {"number" if name == "integer" else name for name in named if isinstance(name, str)}
    if "const" in schema:
        types &= {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        types &= {type_of(value) for value in schema["enum"]}
    return types


def has_fraction(value: Any) -> bool:
    """Whether a value contains a whole number written with a fraction (1.0)."""
    if isinstance(value, float):
        return value.is_integer() and abs(value) < MAX_WHOLE
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(has_fraction, inside))


def either_spelling(value: Any, places: str) -> dict[str, Any]:
    """A schema of this value alone, in which a number written as 1.0 may be spelled 1 or 1.0. The compiler knows one spelling
    of a single number, and several of a multiple of 0.5 within a range. places: the keyword of the schemas by position."""
    if not has_fraction(value):
        return {"const": value}
    if isinstance(value, float):
        return {"type": "number", "minimum": value - 0.25, "maximum": value + 0.25, "multipleOf": 0.5}
    if isinstance(value, list):
        more = "additionalItems" if places == "items" else "items"
        return {"type": "array", places: [either_spelling(each, places) for each in value], more: False, "minItems": len(value)}
    properties = {name: either_spelling(each, places) for name, each in value.items()}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def literally(text: str) -> str:
    """A regex of exactly this string."""
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text)


def other_than(texts: Iterable[str]) -> str:
    """A regex (Rust's syntax, for a whole match) of every string but these."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for char in text:
            node = node.setdefault(char, {})
        node[""] = None
    return _other(trie)


def _other(node: dict[str, Any]) -> str:
    chars = [char for char in node if char]
    ways = [] if "" in node else [""]
    ways.append(f"[^{''.join(map(literally, chars))}]{ANY_TEXT}" if chars else f"(?s:.){ANY_TEXT}")
    ways += [literally(char) + _other(node[char]) for char in chars]
    return f"(?:{'|'.join(ways)})"
