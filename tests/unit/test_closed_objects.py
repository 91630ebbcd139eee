"""Objects are generated closed if their schema lists properties and does not mention others; numbers get bounds of digits."""

import json
from typing import Any

import jsonschema
import pytest

from headrace.data.structured import StructuredOutputs
from headrace.decoding.constrained import Grammars
from headrace.decoding.json_schema.numbers import LARGEST, WIDEST
from headrace.decoding.json_schema.prepare import prepare
from headrace.decoding.tools import ToolChoice, tooling
from headrace.text.tokenizer import Tokenizer
from tests.unit.vocabularies import byte_level

AB: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}}
EXTRA = '{"a":"x","z":1}'
# schema, and whether an unlisted property can be generated in the object with `a`; {} stands for that object
CASES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "an object": (AB, "{}", False),
    "without a type": ({"properties": AB["properties"]}, "{}", False),
    "of a reference": ({"$ref": "#/$defs/o", "$defs": {"o": AB}}, "{}", False),
    "of a reference that refers": ({"$ref": "#/$defs/p", "$defs": {"o": AB, "p": {"$ref": "#/$defs/o"}}}, "{}", False),
    "in a property": ({"properties": {"p": AB}}, '{"p":{}}', False),
    "in an array": ({"type": "array", "items": AB}, "[{}]", False),
    "in a tuple": ({"type": "array", "prefixItems": [AB]}, "[{}]", False),
    "in values": ({"type": "object", "additionalProperties": AB}, '{"p":{}}', False),
    "with titles": ({"title": "T", "description": "d", **AB}, "{}", False),
    "minProperties it can have": ({**AB, "required": ["a", "b"], "minProperties": 2}, '{"a":"x","b":true,"z":1}', False),
    "mentions additionalProperties": ({**AB, "additionalProperties": True}, "{}", True),
    "lists nothing": ({"type": "object"}, "{}", True),
    "patternProperties": ({**AB, "patternProperties": {"^y": {"type": "null"}}}, "{}", True),
    "propertyNames": ({**AB, "propertyNames": {"pattern": "^[a-z]$"}}, "{}", True),
    "unevaluatedProperties": ({**AB, "unevaluatedProperties": True}, "{}", True),
    "a required name outside": ({**AB, "required": ["z"]}, "{}", True),
    "a larger minProperties": ({**AB, "required": ["a", "b"], "minProperties": 3}, '{"a":"x","b":true,"z":1}', True),
    "a branch of allOf": ({"allOf": [AB]}, "{}", True),
    "optional": ({"anyOf": [AB, {"type": "null"}]}, "{}", True),
    "optional, by reference": ({"anyOf": [{"$ref": "#/$defs/o"}, {"type": "null"}], "$defs": {"o": AB}}, "{}", True),
    "an optional property": (
        {
            "type": "object",
            "properties": {"p": {"anyOf": [{"$ref": "#/$defs/o"}, {"type": "null"}], "default": None, "title": "P"}},
            "$defs": {"o": {"type": "object", "title": "O", **AB}},
        },
        '{"p":{}}',
        True,
    ),
    "optional, by oneOf": ({"oneOf": [{"$ref": "#/$defs/o"}, {"type": "null"}], "$defs": {"o": AB}}, "{}", True),
    "optional twice": ({"anyOf": [{"anyOf": [AB, {"type": "null"}]}, {"type": "string"}]}, "{}", True),
    "in a property of a branch": (
        {"anyOf": [{"properties": {"p": AB}, "required": ["p"]}, {"type": "null"}]},
        '{"p":{}}',
        False,
    ),
    "in a property of a branch of oneOf": (
        {"oneOf": [{"type": "object", "properties": {"p": AB}, "required": ["p"]}, {"type": "null"}]},
        '{"p":{}}',
        False,
    ),
    "in a property of a branch that is merged": (
        {"allOf": [{"anyOf": [{"properties": {"p": AB}}, {"type": "null"}]}, {"properties": {"p": {"required": ["z"]}}}]},
        '{"p":{}}',
        True,
    ),
    "an optional list": ({"anyOf": [{"type": "array", "items": AB}, {"type": "null"}]}, "[{}]", False),
    "one or a list": ({"anyOf": [AB, {"type": "array", "items": AB}]}, "{}", True),
    "one of two lists": (
        {"anyOf": [{"type": "array", "items": AB}, {"type": "array", "items": {"required": ["z"]}}]},
        "[{}]",
        False,
    ),
    "one of two objects": ({"anyOf": [AB, {"type": "object", "required": ["z"]}, {"type": "null"}]}, "{}", True),
    "one of two objects, by reference": (
        {"anyOf": [{"$ref": "#/$defs/o"}, {"$ref": "#/$defs/q"}], "$defs": {"o": AB, "q": {"required": ["z"]}}},
        "{}",
        True,
    ),
    "next to anything": ({"anyOf": [AB, {"description": "or whatever"}]}, "{}", True),
    "optional, with a rule next to it": ({"anyOf": [AB, {"type": "null"}], "required": ["z"]}, "{}", True),
    "with allOf": ({**AB, "allOf": [{"required": ["z"]}]}, "{}", True),
    "if": ({**AB, "if": {"required": ["a"]}, "then": {"required": ["z"]}}, "{}", True),
    "the sibling of a reference": ({**AB, "$ref": "#/$defs/o", "$defs": {"o": {"required": ["z"]}}}, "{}", True),
    "the target of a reference with siblings": ({"$ref": "#/$defs/o", "required": ["z"], "$defs": {"o": AB}}, "{}", True),
    "under a branch": ({"allOf": [{"properties": {"p": AB}}, {"properties": {"p": {"required": ["z"]}}}]}, '{"p":{}}', True),
    "beside patternProperties": (
        {"properties": {"p": AB}, "patternProperties": {"p": {"required": ["z"]}}},
        '{"p":{}}',
        True,
    ),
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.from_gguf(byte_level())
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


def passes(grammars: Grammars, text: str, schema: dict[str, Any], **more: Any) -> bool:
    constraint = grammars.constraint(StructuredOutputs.of({"json": schema, "disable_any_whitespace": True, **more}))
    for token in grammars._tokenizer.encode(text, add_special=False):
        if constraint.done:  # nothing may follow
            return False
        constraint.push(token)
    return constraint.whole


@pytest.mark.parametrize("name", CASES)
def test_which_objects_are_closed(grammars: Grammars, name: str) -> None:
    schema, around, is_open = CASES[name]
    text = around.replace("{}", EXTRA)
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))  # it is valid in any case
    assert passes(grammars, text, schema) == is_open
    assert passes(grammars, text, schema, open_objects=True)


def test_a_closed_object_allows_its_listed_properties(grammars: Grammars) -> None:
    for text in ("{}", '{"a":"x"}', '{"b":true}', '{"a":"x","b":false}'):
        assert passes(grammars, text, AB)


def test_a_definition_is_closed_only_if_not_merged(grammars: Grammars) -> None:
    schema = {
        "properties": {"alone": {"$ref": "#/$defs/o"}, "merged": {"allOf": [{"$ref": "#/$defs/o"}, {"required": ["z"]}]}},
        "$defs": {"o": AB},
    }
    assert not passes(grammars, f'{{"alone":{EXTRA}}}', schema)
    assert passes(grammars, f'{{"merged":{EXTRA}}}', schema)


def test_recursive_schemas(grammars: Grammars) -> None:
    schema = {"$ref": "#/$defs/t", "$defs": {"t": {"properties": {"next": {"$ref": "#/$defs/t"}}}}}
    assert passes(grammars, '{"next":{"next":{}}}', schema)
    assert not passes(grammars, '{"next":{"next":{"z":1}}}', schema)


def test_arguments_of_tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": AB}}
    closed, opened = (
        tooling(ToolChoice([tool], open_objects=flag), None, lambda _: None).spec.grammar for flag in (False, True)
    )
    assert '"additionalProperties": false' in closed
    assert "additionalProperties" not in opened


@pytest.mark.parametrize(
    ("schema", "fitting", "others"),
    [
        ({"type": "integer"}, [0, -7, LARGEST, -LARGEST], [LARGEST + 1, -LARGEST - 1, int("1" * 45)]),
        ({"type": ["integer", "null"]}, [LARGEST, None], [LARGEST + 1]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [LARGEST, None], [LARGEST + 1]),
        ({"type": "array", "items": {"type": "integer"}}, [[LARGEST]], [[LARGEST + 1]]),
        ({"type": "integer", "minimum": 0}, [LARGEST], [LARGEST + 1, -1]),
        ({"type": "integer", "maximum": 5}, [-LARGEST], [-LARGEST - 1, 6]),
        ({"type": "integer", "maximum": 10**17}, [10**17], [10**17 + 1]),
        ({"type": "integer", "minimum": 10**17}, [10**17, 10**18], [10**17 - 1, int("1" * 45)]),
        ({"type": "integer", "exclusiveMinimum": 10**15}, [10**15 + 1], [10**15]),
        ({"enum": [10**18, 1]}, [10**18, 1], [2]),
        ({"type": "integer", "enum": [10**18]}, [10**18], []),
        ({"type": "integer", "allOf": [{"minimum": 10**17}]}, [10**17], []),
        ({"type": "number"}, [0.5, 1e-09, 6.02e23, 0.1234567891], []),
        ({"type": "number", "minimum": 0, "maximum": 1}, [0.123456789, 1], [1.5]),
        ({"type": "number", "minimum": 0, "maximum": 1e-12}, [1e-13], [1e-11]),
        ({"type": "number", "multipleOf": 0.01}, [0.25], [0.255]),
    ],
)
def test_digits_are_bounded(grammars: Grammars, schema: dict[str, Any], fitting: list[Any], others: list[Any]) -> None:
    for value in (*fitting, *others):
        text = f"{value:.13f}".rstrip("0") if value in (1e-13, 1e-11) else json.dumps(value, separators=(",", ":"))
        assert passes(grammars, text, schema) == (value in fitting), text


def test_open_schemas_have_no_bound_of_digits(grammars: Grammars) -> None:
    assert passes(grammars, "1" * 45, {"type": "integer"}, open_objects=True)
    assert prepare({"type": "integer"}).schema == {"type": "integer"}


def test_a_bound_beyond_the_usual_one_still_ends(grammars: Grammars) -> None:
    assert prepare({"type": "integer", "minimum": 10**17}, closed=True).schema["maximum"] == WIDEST
