"""What a schema is rewritten to means the same: on our own cases, and on the official test suite of JSON Schema."""

import json
from itertools import product
from typing import Any

import jsonschema
import pytest

from headrace.data.structured import ConstraintError, StructuredOutputs
from headrace.decoding.json_schema.disjoint import disjoint
from headrace.decoding.json_schema.document import Document
from headrace.decoding.json_schema.negation import OPPOSITE
from headrace.decoding.json_schema.prepare import Prepared, prepare, why_broken
from tests.places import data_path
from tests.trap import reached, trap

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {}}}
CASES: dict[str, dict[str, Any]] = {
    "dependencies": {**OBJECT, "dependencies": {"a": ["b"], "b": {"required": ["c"]}}, "$schema": DRAFT_7},
    "dependentRequired": {**OBJECT, "dependentRequired": {"a": ["b", "c"]}},
    "not required": {**OBJECT, "not": {"required": ["a"]}},
    "not required, two": {**OBJECT, "not": {"required": ["a", "b"]}},
    "not properties": {**OBJECT, "not": {"properties": {"a": {"minimum": 3}}, "required": ["b"]}},
    "not enum": {"not": {"enum": ["x", "xy", "", 1, 2.5, None, True]}},
    "enum, with fractions": {"enum": [1.0, "x", [1.0, 2, 3, "x"], {"a": 1.0}, {"a": 1.0, "b": "x"}]},
    "const, with a fraction, draft 7": {"$schema": DRAFT_7, "const": [1.0]},
    "not type": {"not": {"type": ["string", "null"]}},
    "not not": {"not": {"not": {"type": "object"}}},
    "not anyOf": {"not": {"anyOf": [{"type": "string"}, {"minimum": 2}]}},
    "not allOf": {"not": {"allOf": [{"type": "string"}, {"maxLength": 1}]}},
    "not oneOf": {"not": {"oneOf": [{"type": "string"}, {"maxLength": 1}]}},
    "not oneOf, of texts": {"type": "string", "not": {"oneOf": [{"enum": ["x", [], {}]}, {"maxLength": 0}]}},
    "not anyOf, of texts": {"type": "string", "not": {"anyOf": [{"enum": ["x", [], {}]}, {"maxLength": 0}]}},
    "not allOf, of texts": {"type": "string", "not": {"allOf": [{"enum": ["x", [], {}]}, {"maxLength": 5}]}},
    "not items, place by place": {
        "$schema": DRAFT_7,
        "type": ["array", "null"],
        "not": {"items": [{"type": "number"}, {"type": "string"}]},
    },
    "not prefixItems": {"type": ["array", "null"], "not": {"prefixItems": [{"type": "string"}, {"type": "number"}]}},
    "not contains": {"type": "array", "not": {"contains": {"type": "string"}}},
    "not properties, of anything": {"not": {"properties": {"a": {"type": "string"}, "b": True}}},
    "not required, of anything": {"not": {"required": ["a", "c"]}},
    **{f"not {name}": {"not": {name: 2}} for name in OPPOSITE if "Length" not in name},
    "not minLength": {"not": {"minLength": 1}},
    "not maxLength": {"not": {"maxLength": 1}},
    "not ref": {"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "object", "required": ["a"]}}},
    "not, recursive": {
        "not": {"$ref": "#/$defs/t"},
        "$defs": {"t": {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}}},
    },
    "oneOf, apart": {"oneOf": [{"type": "string"}, {"type": "number"}]},
    "oneOf, tagged": {"oneOf": [{"required": ["a"], "properties": {"a": {"const": v}}, "type": "object"} for v in (1, 2)]},
    "oneOf, overlapping": {"oneOf": [{"minimum": 1}, {"maximum": 2}]},
    "oneOf required": {**OBJECT, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "if": {
        **OBJECT,
        "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        "then": {"required": ["b"]},
        "else": {"required": ["c"]},
    },
    "propertyNames": {"propertyNames": {"enum": ["a", "b"]}},
    "propertyNames pattern": {"propertyNames": {"pattern": "^[ab]$"}},
    "contains": {"type": "array", "contains": {"type": "string"}, "maxItems": 3},
    "contains, draft 7": {"type": "array", "contains": {"type": "string"}, "maxItems": 3, "$schema": DRAFT_7},
    "uniqueItems": {"type": "array", "uniqueItems": False},
    "uniqueItems, of no list": {"type": "object", "uniqueItems": True},
    "uniqueItems, of one": {"type": ["array", "null"], "maxItems": 1, "uniqueItems": True},
    "unevaluated": {**OBJECT, "unevaluatedProperties": False},
    "unevaluated, then without if": {**OBJECT, "then": {"properties": {"d": {}}}, "else": {}, "unevaluatedProperties": False},
    "root ref": {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "not": {"required": ["b"]}},
}  # fmt: skip
LEAVES: list[Any] = [None, True, False, 0, 1, 2, 2.5, 3, "", "x", "xy", "y", [], [1], ["x", 1], [1, 2, 3, "x"], {}]
OBJECTS = [
    {name: value for name, value in zip("abcd", values, strict=True) if value is not ...}
    for values in product([..., 1, 2, None], [..., "x"], [..., 0], [..., {}])
]
INSTANCES = [*LEAVES, *OBJECTS, {"a": {}}, {"a": {"a": 1}}, {"a": {"b": 1}}]
LATE: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"not": {"multipleOf": 2}},
    "oneOf": {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]},
    "pattern": {"type": "string", "pattern": "^(?=x)xy"},
    "contains": {"type": "array", "contains": {"const": 1}},
}


def fits(schema: Any, value: Any) -> bool:
    return bool(jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema).is_valid(value))


def words_of(schema: Any) -> set[str]:
    """The keys of all objects in it."""
    if isinstance(schema, dict):
        return set(schema).union(*map(words_of, schema.values()))
    return set().union(*map(words_of, schema)) if isinstance(schema, list) else set()


@pytest.mark.parametrize("name", CASES)
def test_a_rewritten_schema_accepts_the_same_values(name: str) -> None:
    schema = CASES[name]
    prepared = prepare(schema)
    assert prepared.late == ()
    assert not words_of(prepared.schema) & {
        "not",
        "oneOf",
        "if",
        "dependencies",
        "dependentRequired",
        "propertyNames",
        "contains",
    }
    expected = [fits(schema, value) for value in INSTANCES]
    assert [fits(prepared.schema, value) for value in INSTANCES] == expected
    assert len(set(expected)) == 2 or name == "uniqueItems"  # it says yes and no


@pytest.mark.parametrize("name", LATE)
def test_unsupported_keywords_are_named_and_dropped(name: str) -> None:
    """The rest still allows all that fits."""
    prepared = prepare(LATE[name])
    assert prepared.late == (name,)
    assert all(fits(prepared.schema, value) for value in [*INSTANCES, 6, 5, [1, 1]] if fits(LATE[name], value))


@pytest.mark.parametrize("name", [name for name in OPPOSITE if name.startswith("min") and name != "minimum"])
def test_nothing_is_shorter_than_nothing(name: str) -> None:
    assert not any(fits(prepare({"not": {name: 0}}).schema, value) for value in INSTANCES)


def test_the_complement_of_an_unsupported_part_is_dropped() -> None:
    """Of references that lead from one to the other the last cannot be turned round: nothing points at what is not there."""
    parts = {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}]}, "b": {"type": "string"}, "c": {"multipleOf": 2}}
    schema = {"not": {"$ref": "#/$defs/a"}, "$defs": parts}
    prepared = prepare(schema)
    assert prepared == Prepared({}, ("not",))
    again = prepare({"allOf": [schema, {"not": {"$ref": "#/$defs/b"}}], "$defs": parts})
    assert again.late == ("not",)
    assert [value for value in INSTANCES if not fits(again.schema, value)] == ["", "x", "xy", "y"]


ANNOTATIONS = (
    "$comment $anchor $defs definitions title description default examples example deprecated readOnly writeOnly "
    "contentEncoding contentMediaType contentSchema x-guidance"
)


@pytest.mark.parametrize("word", ANNOTATIONS.split())
def test_annotations_are_dropped_and_change_nothing(word: str) -> None:
    for value in ({}, {"type": "null"}, "never"):
        rest = {"type": "string", "maxLength": 1}
        assert prepare({**rest, word: value}) == Prepared(rest)
        negated = prepare({"not": {**rest, word: value}})
        assert negated.late == ()
        assert [each for each in INSTANCES if not fits(negated.schema, each)] == ["", "x", "y"]


SPEAK_OF_PROPERTIES: dict[str, Any] = {
    **{word: [OBJECT] for word in ("allOf", "anyOf", "oneOf")},
    "if": OBJECT,
    "dependentSchemas": {"a": OBJECT},
    "not": {"type": "string"},
    "$ref": "#/$defs/a",
    "$dynamicRef": "#/$defs/a",
}


@pytest.mark.parametrize("word", SPEAK_OF_PROPERTIES)
def test_properties_of_other_keywords_are_not_unevaluated(word: str) -> None:
    """Beside a word whose schemas may speak of properties it cannot be told which are left."""
    schema = {"type": "object", word: SPEAK_OF_PROPERTIES[word], "unevaluatedProperties": False, "$defs": {"a": OBJECT}}
    prepared = prepare(schema)
    assert prepared.late == ("unevaluatedProperties",)
    assert "additionalProperties" not in words_of(prepared.schema)


@pytest.mark.parametrize("items", [{"type": "string"}, False])
def test_the_complement_of_items_is_unsupported(items: Any) -> None:
    schema = {"not": {"items": items}}
    prepared = prepare(schema)
    assert prepared.late == ("not",)
    assert all(fits(prepared.schema, value) for value in INSTANCES if fits(schema, value))


@pytest.mark.parametrize("items", [True, {}])
def test_a_schema_that_every_item_fits_has_an_empty_complement(items: Any) -> None:
    prepared = prepare({"not": {"items": items, "minimum": 2}})
    assert prepared.late == ()
    assert [value for value in INSTANCES if fits(prepared.schema, value)] == [0, 1]


@pytest.mark.parametrize("name", CASES)
def test_preparing_twice_changes_nothing(name: str) -> None:
    once = prepare(CASES[name])
    twice = prepare(once.schema)
    assert twice.late == ()
    assert [fits(twice.schema, value) for value in INSTANCES] == [fits(once.schema, value) for value in INSTANCES]


SKIPPED = {"format", "refRemote", "anchor", "dynamicRef", "id", "unevaluatedItems", "content", "vocabulary", "ecmascript-regex"}


@pytest.mark.parametrize("draft", ["draft7", "draft2020-12"])
def test_the_official_suite(draft: str) -> None:
    """Where the original gives the right answer, so does what it is rewritten to; where a keyword is late, what fits still
    does."""
    folder = data_path(f"json_schema_test_suite/tests/{draft}/not.json").parent
    compared = late = 0
    for path in sorted(folder.glob("*.json")):
        if path.stem in SKIPPED:
            continue
        for group in json.loads(path.read_text()):
            schema = group["schema"]
            if not isinstance(schema, dict):
                continue
            if draft == "draft7":
                schema = {"$schema": DRAFT_7, **schema}
            try:
                prepared = prepare(schema)
            except ConstraintError:
                continue
            for test in group["tests"]:
                try:
                    right = fits(schema, test["data"]) == test["valid"]
                except Exception:  # references the oracle cannot follow here
                    continue
                found = fits(prepared.schema, test["data"])
                where = (path.stem, group["description"], test["description"])
                if right and not prepared.late:
                    assert found == test["valid"], where
                    compared += 1
                elif right and test["valid"]:
                    assert found, where
                    late += 1
    assert compared > 500
    assert late > 20


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        deep(300),
        {"oneOf": [{"minimum": i, "properties": {str(i): {}}} for i in range(400)]},
        {"$ref": "#/nowhere"},
        {"$ref": "#/type", "type": "string"},
    ],
)
def test_schemas_beyond_the_limits_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ConstraintError, match=r".{20}"):
        prepare(schema)


# Schemas that lead out of themselves, here and there; `URL` is where to.
OUTWARD: list[dict[str, Any]] = [
    {"$ref": "URL"},
    {"$dynamicRef": "URL"},
    {"$recursiveRef": "URL"},
    {"$dynamicRef": "other.json#/a"},
    {"properties": {"a": {"oneOf": [{"const": 1}, {"$dynamicRef": "URL"}]}}},
    {"oneOf": [{"const": 1}, {"$ref": "URL"}]},
    {"oneOf": [{"const": 1}, {"not": {"$dynamicRef": "URL"}, "multipleOf": 7}]},
    {"oneOf": [{"const": {"a": 1}}, {"properties": {"a": {"$dynamicRef": "URL"}}}]},
]
NAMED_SO = {"$id": "http://127.0.0.1:1/", "oneOf": [{"const": 1}, {"not": {"$dynamicRef": "URL"}, "multipleOf": 7}]}


def pointed(schema: Any, url: str) -> Any:
    return json.loads(json.dumps(schema).replace("URL", url))


@pytest.mark.parametrize("schema", OUTWARD, ids=json.dumps)
@pytest.mark.parametrize("file", [False, True])
def test_references_that_lead_out_are_refused(schema: dict[str, Any], file: bool) -> None:
    with trap() as (url, got), reached() as tried, pytest.raises(ConstraintError, match="only references within it"):
        prepare(pointed(schema, "file:///etc/hostname#/a" if file else url))
    assert (got, tried) == ([], [])


@pytest.mark.parametrize("schema", [*OUTWARD, NAMED_SO], ids=json.dumps)
def test_nothing_is_fetched_wherever_a_validator_runs(schema: dict[str, Any]) -> None:
    """Behind the refusal: whoever asks whether values fit finds what a schema itself holds, and nothing else."""
    with trap() as (url, got), reached() as tried:
        outward = pointed(schema, url)
        why_broken(StructuredOutputs(json=outward), "1")
        disjoint(Document(outward), [{"enum": [1, {"a": 1}, 7]}], [outward])
        if schema is NAMED_SO:
            prepare(outward)
    assert (got, tried) == ([], [])


def test_the_trap_records_remote_references_of_a_validator() -> None:
    """The control: the library's own default asks another host."""
    with trap() as (url, got), reached() as tried, pytest.warns(DeprecationWarning, match="remote references"):
        jsonschema.Draft202012Validator({"$dynamicRef": url}).is_valid(1)
    assert len(got) == 1
    assert {event for event, _ in tried} >= {"socket.connect", "urllib.Request"}


def test_a_reference_to_a_named_part_is_local() -> None:
    schema = {"$id": "http://a.example/", "$defs": {"n": {"$id": "n", "type": "integer"}}, "$ref": "n"}
    assert prepare(schema).schema == schema
