"""Whether two schemas can share a value. True means proved disjoint; False means undecided or not disjoint."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.decoding.json_schema.document import Document, is_local
from headrace.decoding.json_schema.literals import types_of

DEPTH = 12  # references, properties and alternatives followed
MAX_VALUES = 200  # of an enum that are tried one by one
# lower bound, upper bound, type
RANGES = (("minLength", "maxLength", "string"), ("minItems", "maxItems", "array"), ("minProperties", "maxProperties", "object"))


@dataclass(slots=True)
class Facts:
    """What a set of schemas requires together, as far as it is simple to read."""

    types: frozenset[str]
    required: set[str] = field(default_factory=set)
    properties: dict[str, list[Any]] = field(default_factory=dict)
    closed: list[set[str]] = field(default_factory=list)  # sets of the only names there may be
    values: list[Any] | None = None
    rules: list[dict[str, Any]] = field(default_factory=list)  # all of them, references resolved
    choices: list[list[Any]] = field(default_factory=list)  # anyOf and oneOf among them
    empty: bool = False


def disjoint(document: Document, a: list[Any], b: list[Any], depth: int = DEPTH) -> bool:
    """Whether no value fits all schemas of `a` and all of `b`."""
    document.count()
    if depth == 0:
        return False
    left, right = _facts(document, a, depth), _facts(document, b, depth)
    if left.empty or right.empty or not left.types & right.types:
        return True
    if _ranges_apart(left, right) or _values_apart(document, left, b) or _values_apart(document, right, a):
        return True
    if left.types & right.types == {"object"} and _objects_apart(document, left, right, depth):
        return True
    return any(
        all(disjoint(document, [*mine, choice], theirs, depth - 1) for choice in choices)
        for facts, mine, theirs in ((left, a, b), (right, b, a))
        for choices in facts.choices
        if not any(choice in mine for choice in choices)
    )


def _facts(document: Document, schemas: list[Any], depth: int) -> Facts:
    facts = Facts(types=frozenset({"null", "boolean", "object", "array", "string", "number"}))
    for schema in _flat(document, schemas, depth):
        facts.types &= types_of(schema)
        if schema is False:
            facts.empty = True
        if not isinstance(schema, dict):
            continue
        facts.rules.append(schema)
        facts.required.update(schema.get("required", []))
        properties = schema.get("properties", {})
        for name, rule in properties.items():
            facts.properties.setdefault(name, []).append(rule)
        if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            facts.closed.append(set(properties))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None and facts.values is None:
            facts.values = values
        facts.choices += [schema[name] for name in ("anyOf", "oneOf") if name in schema]
    return facts


def _flat(document: Document, schemas: list[Any], depth: int) -> Iterator[Any]:
    """The schemas, those they refer to, and the parts of each allOf."""
    for schema in schemas:
        document.count()
        if not isinstance(schema, dict) or depth == 0:
            yield schema
            continue
        own = document.own(schema)
        yield own
        if is_local(own.get("$ref")):
            yield from _flat(document, [document.resolve(own["$ref"])], depth - 1)
        yield from _flat(document, own.get("allOf", []), depth - 1)


def _values_apart(document: Document, facts: Facts, others: list[Any]) -> bool:
    """Whether each of a few values fails the other side, tried one by one."""
    if facts.values is None or len(facts.values) > MAX_VALUES:
        return False
    base: dict[str, Any] = {key: document.root[key] for key in ("$schema", "$defs", "definitions") if key in document.root}
    for value in facts.values:
        document.count()
        if not any(_fails(document, base, other, value) for other in others):
            return False
    return True


def _fails(document: Document, base: dict[str, Any], schema: Any, value: Any) -> bool:
    """Whether a value does not fit a schema; False if that cannot be decided here."""
    if schema is False:
        return True
    if not isinstance(schema, dict) or _far(schema):
        return False
    from headrace.decoding.json_schema.checking import validator  # jsonschema

    try:
        return not validator({**base, **schema}, base).is_valid(value)
    except Exception:
        # References outside the base, or patterns of another dialect: undecided.
        return False


def _far(schema: Any) -> bool:
    """Whether a schema has patterns, whose dialect and cost are unknown here."""
    return '"pattern' in repr(schema).replace("'", '"')


def _ranges_apart(left: Facts, right: Facts) -> bool:
    kinds = left.types & right.types
    rules = [*left.rules, *right.rules]
    for low, high, kind in RANGES:
        if kinds == {kind} and max(_numbers(rules, low), default=0) > min(_numbers(rules, high), default=math.inf):
            return True
    if kinds != {"number"}:
        return False
    lowest, highest = max(_numbers(rules, "minimum"), default=-math.inf), min(_numbers(rules, "maximum"), default=math.inf)
    above = max(_numbers(rules, "exclusiveMinimum"), default=-math.inf)
    below = min(_numbers(rules, "exclusiveMaximum"), default=math.inf)
    return lowest > highest or above >= highest or lowest >= below or above >= below


def _numbers(rules: list[dict[str, Any]], name: str) -> list[float]:
    return [rule[name] for rule in rules if isinstance(rule.get(name), (int, float)) and not isinstance(rule[name], bool)]


def _objects_apart(document: Document, left: Facts, right: Facts, depth: int) -> bool:
    """Whether the objects must have a property that the other side forbids, or that the two sides require differently."""
    for name in sorted(left.required | right.required):
        rules = [*left.properties.get(name, []), *right.properties.get(name, [])]
        if any(rule is False for rule in rules) or any(name not in names for names in [*left.closed, *right.closed]):
            return True
        mine, theirs = left.properties.get(name), right.properties.get(name)
        if mine and theirs and disjoint(document, mine, theirs, depth - 1):
            return True
    return False
