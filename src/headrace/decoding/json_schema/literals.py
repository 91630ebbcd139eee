"""Values and types of JSON as schemas see them, and regexes about plain texts."""

from collections.abc import Iterable
from typing import Any

TYPES = frozenset({"null", "boolean", "object", "array", "string", "number"})  # an integer is a number
ANY_TEXT = "(?s:.)*"
MAX_TEXT = 4000  # characters of texts in one complement
MOST_WHOLE = 1e15  # beyond it a quarter more is the same float


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
    """The types that `type`, `enum` and `const` of a schema leave; "integer" counts as number."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, dict):
        return TYPES
    found = TYPES
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found &= {"number" if name == "integer" else name for name in named if isinstance(name, str)}
    if "const" in schema:
        found &= {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= {type_of(value) for value in schema["enum"]}
    return found


def has_fraction(value: Any) -> bool:
    """Whether a number is in it that is whole, and written with a fraction (1.0)."""
    if isinstance(value, float):
        return value.is_integer() and abs(value) < MOST_WHOLE
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(has_fraction, inside))


def either_spelling(value: Any, places: str) -> dict[str, Any]:
    """A schema of just this value, whose numbers written as 1.0 may be written as 1 and as 1.0: the compiler knows one spelling
    of a single number, and several of a multiple of 0.5 within a range. `places`: the keyword of schemas place by place."""
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
    """A regex of just this text."""
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text)


def other_than(texts: Iterable[str]) -> str:
    """A regex (Rust's syntax, to be matched whole) of every text but these."""
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
