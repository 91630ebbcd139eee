"""Rewrites a JSON schema for the grammar compiler. Keywords it does not know are expressed exactly by others where possible.
The rest is left out and named, to be checked when the output is complete."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.data.structured import ConstraintError, StructuredOutputs
from headrace.decoding.json_schema.disjoint import disjoint
from headrace.decoding.json_schema.document import Document, InexpressibleError, is_local
from headrace.decoding.json_schema.literals import either_spelling, has_fraction, types_of
from headrace.decoding.json_schema.negation import SILENT, Negation, all_of, any_of
from headrace.decoding.json_schema.numbers import (
    BOUNDS,
    check_all,
    check_multiple,
    check_values,
    kept_bound,
    kept_range,
    with_digits,
)

MAX_DEPTH = 64  # of nested schemas
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())  # known to the compiler
# Other formats of the standard, as regexes.
SPELLED = {
    "uri-reference": r"^(?:[A-Za-z][A-Za-z0-9+.-]*:)?(?:[^\x00-\x20\"<>\\^`{|}#:/?]*(?:[/?][^\x00-\x20\"<>\\^`{|}#]*)?)"
    r"(?:#[^\x00-\x20\"<>\\^`{|}#]*)?$",
    "uri-template": r"^(?:[^\x00-\x20\"'%<>\\^`{|}]|%[0-9A-Fa-f]{2}|"
    r"\{[+#./;?&=,!@|]?[\w%.]+(?::[1-9][0-9]{0,3}|\*)?(?:,[\w%.]+(?::[1-9][0-9]{0,3}|\*)?)*\})*$",
    "json-pointer": r"^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": r"^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
}
NOT = "not:"  # begins the name of a complement
LOOKAROUND = re.compile(r"\(\?(?:=|!|<)|\\[1-9]")  # what a finite automaton cannot do
SOME = ("anyOf", "allOf", "prefixItems")  # keywords that hold lists of schemas
ONE = ("additionalProperties", "additionalItems", "unevaluatedItems")  # and single ones
VALUES = ("const", "enum")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
NAMED = ("properties", "patternProperties")  # and named ones


IN_PLACE = frozenset(  # keywords with schemas for the same value
    "allOf anyOf oneOf not if dependencies dependentRequired dependentSchemas $ref $dynamicRef $recursiveRef".split()
)
OVERLAPPING = frozenset("patternProperties contains unevaluatedProperties unevaluatedItems".split())  # for the same parts
OPEN = frozenset("additionalProperties patternProperties propertyNames unevaluatedProperties".split())
# Place of a schema: among others for its value; a branch of nothing but a union; the only schema of its value.
MERGED, BRANCH, ALONE = 0, 1, 2


def place_of(key: str, own: dict[str, Any], place: int) -> int:
    """The place of the schemas under one keyword of a schema at `place`. Those inside a branch apply to other values, alone."""
    if list(own) == ["$ref"] and key == "$ref":
        return place
    if list(own) == ["anyOf"] and key == "anyOf":
        return min(place, BRANCH)
    return MERGED if place == MERGED or (IN_PLACE | OVERLAPPING) & set(own) else ALONE


def is_closable(own: dict[str, Any]) -> bool:
    """Whether an object can be generated without properties that its schema does not list."""
    listed = own.get("properties")
    if not isinstance(listed, dict) or (OPEN | IN_PLACE) & set(own):
        return False
    required, least = own.get("required", []), own.get("minProperties", 0)
    allowed = [name for name, schema in listed.items() if schema is not False]
    named = isinstance(required, list) and all(name in listed for name in required)
    return named and isinstance(least, (int, float)) and least <= len(allowed)


@dataclass(frozen=True, slots=True)
class Prepared:
    """schema: accepts all values of the original, and no others except through the keywords in `late`."""

    schema: dict[str, Any]
    late: tuple[str, ...] = ()


def prepare(schema: dict[str, Any], *, closed: bool = False) -> Prepared:
    """Rewrite a schema for the compiler. Raises ConstraintError if it is too large, or if a reference leads nowhere.

    closed: objects that list their properties get no others, and integers get bounds of their digits; all generated values
    still fit the original schema. A schema with named references stays open.
    """
    if _has_named_references(schema):
        check_all(schema)
        return Prepared(schema)
    return _Rewriter(schema, closed).run()


def _has_named_references(schema: dict[str, Any]) -> bool:
    """Whether references are more than paths, so that the compiler has to follow them. Raises ConstraintError for references
    outside the schema: nothing is fetched."""
    todo: list[tuple[Any, int]] = [(schema, 0)]
    has_names = named = False
    outside = ""
    while todo:
        node, depth = todo.pop()
        if depth > 4 * MAX_DEPTH:
            raise ConstraintError(f"the JSON schema is nested more than {MAX_DEPTH} deep; flatten it")
        if isinstance(node, dict):
            has_names |= "$ref" in node and isinstance(node["$ref"], str) and not is_local(node["$ref"])
            has_names |= node is not schema and any(isinstance(node.get(name), str) for name in ("$id", "$anchor"))
            named |= isinstance(node.get("$id"), str)
            for name in REFERENCES:
                if isinstance(node.get(name), str) and not node[name].startswith("#"):
                    outside = outside or node[name]
            todo += [(value, depth + 1) for value in node.values()]
        elif isinstance(node, list):
            todo += [(value, depth + 1) for value in node]
    # With names in the schema the reference may be one of them.
    if outside and not named:
        raise ConstraintError(f"the JSON schema refers to {outside[:80]!r}; only references within it (#/…) are followed")
    return has_names


class _Rewriter:
    """Rewrites one schema."""

    def __init__(self, root: dict[str, Any], closed: bool) -> None:
        self.document = Document(root)
        self.place = ALONE if closed else MERGED
        self.placed: dict[tuple[str, int], str] = {}  # by reference and place: name in $defs
        self.late: set[str] = set()
        self.names: dict[tuple[str, bool], str] = {}  # by reference and whether complemented: name in $defs
        self.defs: dict[str, Any] = {}
        self.todo: list[tuple[str, Callable[[], Any]]] = []
        self.negation = Negation(self.document, self.complement, self.conditions)

    def run(self) -> Prepared:
        result: dict[str, Any] = self.positive(self.document.root, 0, self.place)
        while self.todo:
            name, make = self.todo.pop()
            self.defs[name] = make()
        if "$schema" in self.document.root:
            result = {"$schema": self.document.root["$schema"], **result}
        if self.defs:
            result = {**result, "$defs": self.defs}
        return Prepared(result, tuple(sorted(self.late)))

    # -- references ----------------------------------------------------------------------------------------------------
    def reference(self, ref: str, place: int = MERGED) -> dict[str, str]:
        target = self.document.resolve(ref)
        if place != MERGED:
            if (ref, place) not in self.placed:
                name = self.placed[ref, place] = f"at{len(self.placed)}"
                self.todo.append((name, lambda: self.positive(target, 0, place)))
            return {"$ref": f"#/$defs/{self.placed[ref, place]}"}
        if (ref, True) not in self.names:
            name = self.names[ref, True] = f"is{len(self.names)}"
            self.todo.append((name, lambda: self.positive(target, 0)))
        return {"$ref": f"#/$defs/{self.names[ref, True]}"}

    def complement(self, ref: str) -> dict[str, str]:
        """The complement of a reference's target; named `NOT` and a name, as it is not part of the document."""
        if ref.startswith(NOT):
            return {"$ref": next(key for (key, _), name in self.names.items() if name == ref.removeprefix(NOT))}
        target = self.document.resolve(ref)
        if (ref, False) in self.names:
            return {"$ref": NOT + self.names[ref, False]}
        before = set(self.names)
        name = self.names[ref, False] = f"not{len(self.names)}"
        try:
            self.defs[name] = self.positive(self.negation.of(target), 0)
        except InexpressibleError:
            for key in set(self.names) - before:  # others made on the way may lean on this one
                if not key[1]:
                    self.defs.pop(self.names.pop(key), None)
            raise
        return {"$ref": NOT + name}

    # -- schemas -------------------------------------------------------------------------------------------------------
    def positive(self, schema: Any, depth: int, place: int = MERGED) -> Any:
        """The same schema rewritten. place: whether other schemas apply to the same value."""
        self.document.count()
        if depth > MAX_DEPTH:
            raise ConstraintError(f"the JSON schema is nested more than {MAX_DEPTH} deep; flatten it")
        if not isinstance(schema, dict):
            return schema
        own = {key: value for key, value in self.document.own(schema).items() if key not in SILENT}
        rules: list[Any] = []
        for rule in self.rules(own):
            rules.append(self.positive(rule, depth + 1, place if list(own) == ["oneOf"] else MERGED))
        result: dict[str, Any] = {}
        for key, value in own.items():
            if key in REWRITTEN or (key == "format" and value not in FORMATS) or (key in VALUES and has_fraction(value)):
                rules += [{"pattern": SPELLED[value]}] if key == "format" and value in SPELLED else []
                continue
            if key == "pattern" and LOOKAROUND.search(str(value)):
                self.late.add(key)
                continue
            result[key] = self.inside(key, value, depth + 1, place_of(key, own, place))
        if place == ALONE and is_closable(own):
            result["additionalProperties"] = False
        result = kept_range(with_digits(result) if place != MERGED and not IN_PLACE & set(own) else result)
        if rules:
            result["allOf"] = [*result.get("allOf", []), *rules]
        return result

    def inside(self, key: str, value: Any, depth: int, place: int) -> Any:
        """The value of one keyword, with its schemas rewritten."""
        if key == "$ref":
            known = isinstance(value, str) and value.startswith(NOT)
            return f"#/$defs/{value.removeprefix(NOT)}" if known else self.reference(value, place)["$ref"]
        if isinstance(value, list) and (key in SOME or key == "items"):
            return [self.positive(each, depth, place) for each in value]
        if key in NAMED and isinstance(value, dict):
            return {name: self.positive(each, depth, place) for name, each in value.items()}
        if key in ONE or key == "items":
            return self.positive(value, depth, place)
        if key in VALUES:
            check_values(value)
        if key == "multipleOf":
            check_multiple(value)
        return kept_bound(key, value) if key in BOUNDS else value

    def rules(self, schema: dict[str, Any]) -> list[Any]:
        """Schemas that express the keywords which the compiler does not know."""
        rules = self.conditions(schema)
        for key in VALUES:
            if key in schema and has_fraction(schema[key]):
                rules.append(self._values(schema[key] if key == "enum" else [schema[key]]))
        for key in ("not", "oneOf", "contains", "propertyNames", "unevaluatedProperties", "uniqueItems"):
            if key not in schema:
                continue
            try:
                rules += getattr(self, f"_{key}")(schema[key], schema)
            except InexpressibleError:
                self.late.add(key)
        return rules

    def conditions(self, schema: dict[str, Any]) -> list[Any]:
        """if, then, else and the dependencies as alternatives."""
        rules: list[Any] = []
        if "if" in schema and ("then" in schema or "else" in schema):
            test = schema["if"]
            then, other = schema.get("then", True), schema.get("else", True)
            rules.append({"anyOf": [{"allOf": [test, then]}, {"allOf": [{"not": test}, other]}]})
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, needs in schema.get(key, {}).items():
                need = {"required": needs} if isinstance(needs, list) else needs
                rules.append({"anyOf": [{"properties": {name: False}}, need]})
        return rules

    def _values(self, values: list[Any]) -> Any:
        """An enumeration in which whole numbers are written as 1.0."""
        ways: list[Any] = []
        for value in values:
            self.document.count()
            if has_fraction(value):
                ways.append(either_spelling(value, self.document.places))
        plain = [value for value in values if not has_fraction(value)]
        return any_of([{"enum": plain}, *ways] if plain else ways)

    # -- one keyword each ----------------------------------------------------------------------------------------------
    def _not(self, value: Any, schema: dict[str, Any]) -> list[Any]:
        return [self.negation.of(value, types_of(schema))]

    def _oneOf(self, branches: list[Any], schema: dict[str, Any]) -> list[Any]:  # noqa: N802
        context = [{key: value for key, value in schema.items() if key not in ("oneOf", "not")}]
        within = types_of(schema)
        ways, exact = [], True
        for i, branch in enumerate(branches):
            rules = [branch]
            for j, other in enumerate(branches):
                if i == j or disjoint(self.document, [*context, branch], [*context, other]):
                    continue
                try:
                    rules.append(self.negation.of(other, within))
                except InexpressibleError:
                    exact = False
            ways.append(all_of(rules))
        if not exact:
            self.late.add("oneOf")
            return [any_of(list(branches))]
        return [any_of(ways)]

    def _contains(self, value: Any, schema: dict[str, Any]) -> list[Any]:
        if "array" not in types_of(schema) or (schema.get("minContains") == 0 and "maxContains" not in schema):
            return []
        if schema.get("minContains", 1) != 1 or "maxContains" in schema:
            raise InexpressibleError
        if value is True or value == {}:
            return [{"minItems": 1}]
        most = schema.get("maxItems")
        if not isinstance(most, int) or most > 8:
            raise InexpressibleError
        others = {"type": sorted(types_of({}) - {"array"})}
        places = [{"type": "array", "minItems": i + 1, self.document.places: [True] * i + [value]} for i in range(most)]
        return [{"anyOf": [others, *places]}]

    def _propertyNames(self, value: Any, schema: dict[str, Any]) -> list[Any]:  # noqa: N802
        if "object" not in types_of(schema) or value is True:
            return []
        if not isinstance(value, dict):
            return [{"maxProperties": 0}]
        stated = {key: each for key, each in value.items() if key not in SILENT and (key, each) != ("type", "string")}
        if list(stated) == ["pattern"]:
            return [{"patternProperties": {stated["pattern"]: True}, "additionalProperties": False}]
        if list(stated) in (["enum"], ["const"]):
            names = stated.get("enum", [stated.get("const")])
            known = {name: True for name in names if isinstance(name, str)}
            return [{"properties": known, "additionalProperties": False}]
        raise InexpressibleError

    def _unevaluatedProperties(self, value: Any, schema: dict[str, Any]) -> list[Any]:  # noqa: N802
        """Without other keywords about properties it equals additionalProperties."""
        others = {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "$dynamicRef"}
        if others & set(schema):
            raise InexpressibleError
        if "additionalProperties" in schema:
            return []
        return [{**{key: schema[key] for key in NAMED if key in schema}, "additionalProperties": value}]

    def _uniqueItems(self, value: Any, schema: dict[str, Any]) -> list[Any]:  # noqa: N802
        if not value or "array" not in types_of(schema) or schema.get("maxItems", 2) < 2:
            return []
        raise InexpressibleError


REWRITTEN = frozenset(
    "not oneOf if then else dependencies dependentRequired dependentSchemas contains minContains maxContains propertyNames "
    "unevaluatedProperties uniqueItems".split()
)


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
