"""The complement of a schema as a schema without `not`: a value does not fit A if it breaks one of A's keywords."""

import itertools
from collections.abc import Callable
from typing import Any

from headrace.decoding.json_schema.document import Document, InexpressibleError
from headrace.decoding.json_schema.literals import MAX_TEXT, TYPES, other_than, type_of

Types = frozenset[str]
# Keywords that restrict nothing.
SILENT = frozenset(
    "$schema $id id $comment $anchor $defs definitions title description default examples example deprecated readOnly "
    "writeOnly contentEncoding contentMediaType contentSchema x-guidance".split()
)
HARD = frozenset(
    "multipleOf pattern format patternProperties additionalProperties additionalItems unevaluatedProperties unevaluatedItems "
    "propertyNames minContains maxContains $dynamicRef $recursiveRef".split()
)
# keyword -> type, the opposite keyword, and the number to add to its value
OPPOSITE: dict[str, tuple[str, str, int]] = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}


class Negation:
    """Complements of the schemas of one document. refer: returns the name of the complement of a reference's target. plain:
    rewrites conditions and dependencies."""

    def __init__(self, document: Document, refer: Callable[[str], Any], plain: Callable[[dict[str, Any]], list[Any]]) -> None:
        self._document = document
        self._refer = refer
        self._plain = plain

    def of(self, schema: Any, within: Types = TYPES) -> Any:
        """A schema that, among values of the types `within`, accepts exactly what `schema` does not. Raises
        InexpressibleError."""
        self._document.count()
        if isinstance(schema, bool) or not schema:
            return schema is False
        own = self._document.own(schema)
        ways: list[Any] = []
        for keyword, value in own.items():
            if keyword in SILENT:
                continue
            ways += self._way(keyword, value, own, within)
        for rule in self._plain(own):  # conditions and dependencies
            ways.append(self.of(rule, within))
        return any_of(ways)

    def _way(self, keyword: str, value: Any, schema: dict[str, Any], within: Types) -> list[Any]:
        """The schemas of the values that break one keyword."""
        if keyword in OPPOSITE:
            return _beyond(keyword, value, within)
        match keyword:
            case "$ref":
                return [self._refer(value)]
            case "type":
                return _other_types(value, within)
            case "enum" | "const":
                return _other_values(value if keyword == "enum" else [value], within)
            case "not":
                return [value]
            case "anyOf":
                return [all_of([self.of(each, within) for each in value])]
            case "allOf":
                return [self.of(each, within) for each in value]
            case "oneOf":
                return self._none_or_several(value, within)
            case "required" | "properties":
                return self._of_object(keyword, value) if "object" in within else []
            case "items" | "prefixItems" | "contains":
                return self._of_array(keyword, value, schema) if "array" in within else []
            case "uniqueItems" if not value:
                return []
        if keyword in HARD or keyword == "uniqueItems":
            raise InexpressibleError(keyword)
        return []  # unknown keywords restrict nothing

    def _none_or_several(self, branches: list[Any], within: Types) -> list[Any]:
        if len(branches) > 5:
            raise InexpressibleError("oneOf")
        pairs = [all_of([a, b]) for i, a in enumerate(branches) for b in branches[:i]]
        return [all_of([self.of(each, within) for each in branches]), *pairs]

    def _of_object(self, keyword: str, value: Any) -> list[Any]:
        if keyword == "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        return [
            {"type": "object", "required": [name], "properties": {name: wrong}}
            for name, each in value.items()
            if (wrong := self.of(each)) is not False
        ]

    def _of_array(self, keyword: str, value: Any, schema: dict[str, Any]) -> list[Any]:
        if keyword == "contains":
            if "minContains" in schema or "maxContains" in schema:
                raise InexpressibleError(keyword)
            return [{"type": "array", "items": self.of(value)}]
        if isinstance(value, list):
            name = keyword
            return [
                {"type": "array", "minItems": place + 1, name: [True] * place + [wrong]}
                for place, each in enumerate(value)
                if (wrong := self.of(each)) is not False
            ]
        if value is True or value == {}:
            return []
        raise InexpressibleError(keyword)


def any_of(ways: list[Any]) -> Any:
    """The union of schemas, simplified."""
    ways = [way for way in ways if way is not False]
    if any(way is True or way == {} for way in ways):
        return True
    if len(ways) == 1:
        return ways[0]
    return {"anyOf": ways} if ways else False


def all_of(rules: list[Any]) -> Any:
    """The intersection of schemas, simplified."""
    rules = [rule for rule in rules if rule is not True and rule != {}]
    if any(rule is False for rule in rules):
        return False
    if len(rules) == 1:
        return rules[0]
    return {"allOf": rules} if rules else True


def _beyond(keyword: str, value: Any, within: Types) -> list[Any]:
    kind, opposite, step = OPPOSITE[keyword]
    if isinstance(value, bool):  # draft 4: a flag of the other keyword
        raise InexpressibleError(keyword)
    if kind not in within or (value + step < 0 and step):
        return []
    return [{"type": kind, opposite: value + step}]


def _other_types(value: Any, within: Types) -> list[Any]:
    named = {value} if isinstance(value, str) else set(value)
    if "integer" in named and "number" not in named and "number" in within:
        raise InexpressibleError("type")
    left = sorted(within - named)
    return [{"type": left}] if left else []


def _other_values(values: list[Any], within: Types) -> list[Any]:
    ways: list[Any] = []
    for kind in sorted(within):
        mine = [value for value in values if type_of(value) == kind]
        if not mine:
            ways.append({"type": kind})
        elif kind == "boolean":
            ways += [{"const": flag} for flag in (False, True) if flag not in mine]
        elif kind == "string":
            if sum(map(len, mine)) > MAX_TEXT:
                raise InexpressibleError("enum")
            ways.append({"type": "string", "pattern": f"^(?:{other_than(mine)})$"})
        elif kind == "number":
            ways += _other_numbers(sorted(set(mine)))
        elif kind != "null":
            raise InexpressibleError("enum")
    return ways


def _other_numbers(numbers: list[Any]) -> list[Any]:
    """The gaps between numbers."""
    gaps: list[dict[str, Any]] = [{"type": "number", "exclusiveMaximum": numbers[0]}]
    gaps += [{"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in itertools.pairwise(numbers)]
    return [*gaps, {"type": "number", "exclusiveMinimum": numbers[-1]}]
