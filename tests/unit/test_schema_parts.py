"""The parts that schemas are rewritten with: references, complements of texts, whether two have a value in common, formats."""

import json
import re
from itertools import product
from typing import Any

import pytest

from headrace.data.structured import ConstraintError, StructuredOutputs
from headrace.decoding.constrained import Grammars
from headrace.decoding.json_schema.disjoint import disjoint
from headrace.decoding.json_schema.document import Document
from headrace.decoding.json_schema.literals import other_than
from headrace.decoding.json_schema.prepare import prepare
from headrace.text.tokenizer import Tokenizer
from tests.unit.test_grammar import comes_through
from tests.unit.test_json_schema import DRAFT_7, OBJECT
from tests.unit.vocabularies import byte_level


def test_old_drafts_ignore_siblings_of_a_reference() -> None:
    schema = {"$ref": "#/definitions/a", "not": {"required": ["b"]}, "definitions": {"a": {"type": "object"}}}
    old, new = prepare({**schema, "$schema": DRAFT_7}).schema, prepare(schema).schema
    assert "allOf" not in old
    assert "allOf" in new


def test_a_reference_is_followed_through_objects_and_lists() -> None:
    parts = {
        "a/b": {"type": "string"},
        "c~d": {"type": "null"},
        "%": {"type": "array"},
        "list": [{"minimum": 1}, True],
        "no": 3,
    }
    document = Document({"$defs": parts})
    found = {"a~1b": parts["a/b"], "c~0d": parts["c~d"], "%25": parts["%"], "list/0": {"minimum": 1}, "list/1": True}
    assert {ref: document.resolve(f"#/$defs/{ref}") for ref in found} == found
    assert document.resolve("#") == document.root
    for ref in ("e", "list/2", "list/-1", "list/a", "list/123456789", "list/0/minimum/1"):
        with pytest.raises(ConstraintError, match="which is not there; correct it"):
            document.resolve(f"#/$defs/{ref}")
    for ref in ("no", "list", "list/0/minimum"):
        with pytest.raises(ConstraintError, match="which is not a schema; correct it"):
            document.resolve(f"#/$defs/{ref}")
    with pytest.raises(ConstraintError, match=r"refers to 'b\.json#/a'; only references within it"):
        document.resolve("b.json#/a")


@pytest.mark.parametrize("texts", [["a"], ["a", "ab", ""], ["x\n", "水車", '"'], ["mill", "mile", "mil", "m"]])
def test_the_complement_of_texts(texts: list[str]) -> None:
    regex = re.sub(r"\\x\{([0-9a-f]+)\}", lambda code: re.escape(chr(int(code[1], 16))), other_than(texts))
    for text in [*texts, "b", "abc", "mi", "mills", "x", "\n", "水", "", '""', "a\n"]:
        assert (re.fullmatch(regex, text) is None) == (text in texts), text


BOUNDS = list(product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")))
CLOSED = {**OBJECT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        ({"type": "string"}, {"type": "integer"}, True),
        ({"type": "integer"}, {"type": "number"}, False),
        ({"enum": [1, 2]}, {"minimum": 3}, True),
        ({"enum": [1, 3]}, {"minimum": 3}, False),
        ({"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}, True),
        ({"maxLength": 2}, {"minLength": 3}, False),
        ({"type": "string", "maxLength": 3}, {"type": "string", "minLength": 3}, False),
        *[({"type": "number", low: 2}, {"type": "integer", high: 2}, (low, high) != BOUNDS[0]) for low, high in BOUNDS],
        *[({"type": "number", low: 1}, {"type": "number", high: 2}, False) for low, high in BOUNDS],
        *[({"type": "number", low: 3}, {"type": "number", high: 2}, True) for low, high in BOUNDS],
        ({"type": "object", "required": ["a"]}, {"type": "object", "additionalProperties": False}, True),
        ({"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}, False),
        ({"type": "object", "maxProperties": 1}, {"type": "object", "minProperties": 2}, True),
        ({"type": "object", "maxProperties": 2}, {"type": "object", "minProperties": 2}, False),
        ({"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}, True),
        ({"type": "array", "maxItems": 2}, {"type": "array", "minItems": 2}, False),
        ({"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}}, CLOSED, True),
        ({"type": "object", "required": ["d"]}, CLOSED, True),
        ({"type": "object", "required": ["a"]}, {"type": "object", "properties": {"a": False}}, True),
        ({"type": "object", "required": ["a"]}, {"type": "object", "properties": {"a": True}}, False),
        ({"type": "object", "required": ["b"]}, {"type": "object", "properties": {"a": False}}, False),
        ({"type": "object", "required": ["b"]}, CLOSED, False),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, OBJECT, False),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, {"type": "array"}, True),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, {"type": "string"}, False),
    ],
)  # fmt: skip
def test_disjoint(a: dict[str, Any], b: dict[str, Any], apart: bool) -> None:
    assert disjoint(Document({}), [a], [b]) is apart
    assert disjoint(Document({}), [b], [a]) is apart


@pytest.mark.parametrize(("count", "apart"), [(200, True), (201, False)])
def test_few_values_are_tried_one_by_one(count: int, apart: bool) -> None:
    assert disjoint(Document({}), [{"enum": list(range(count))}], [{"minimum": 500}]) is apart


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.from_gguf({**byte_level(), "tokenizer.ggml.merges": []})
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


FORMATS = {
    "date-time": ("2024-02-29T12:00:00Z", "12:00"),
    "time": ("12:00:00Z", "noon"),
    "date": ("2024-02-29", "today"),
    "duration": ("P1D", "a day"),
    "email": ("a@b.example", "a b"),
    "hostname": ("b.example", "a b"),
    "ipv4": ("127.0.0.1", "127"),
    "ipv6": ("::1", "127.0.0.1"),
    "uuid": ("12345678-1234-1234-1234-123456789abc", "1234"),
    "uri": ("http://b.example/", "b c"),
    "uri-reference": ("../a?b#c", "a b"),
    "uri-template": ("/a/{b}", "{"),
    "json-pointer": ("/a/~0", "a"),
    "relative-json-pointer": ("1/a", "/a"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_enforced(grammars: Grammars, name: str) -> None:
    """Of two texts that the format has and has not, only the one comes through the mask."""
    spec = StructuredOutputs(json=json.dumps({"type": "string", "format": name}))
    for text, fits in zip(FORMATS[name], (True, False), strict=True):
        assert comes_through(grammars, spec, grammars._tokenizer.encode(json.dumps(text), add_special=False)) == fits, text


def test_an_unknown_format_is_ignored() -> None:
    prepared = prepare({"type": "string", "format": "colour"})
    assert (prepared.schema, prepared.late) == ({"type": "string"}, ())
