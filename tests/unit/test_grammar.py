"""From what a caller asks for to a grammar that compiles: nesting is bounded, and both notations of grammars are read."""

import json
import re

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from headrace.data.structured import StructuredOutputs
from headrace.decoding.constrained import ConstraintError, Grammars
from headrace.decoding.grammar import MAX_NESTING, grammar_of
from headrace.text.tokenizer import Tokenizer
from tests.unit.vocabularies import byte_level

MANY = 1000  # blanks


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte: no merges."""
    return Tokenizer.from_gguf({**byte_level(), "tokenizer.ggml.merges": []})


def comes_through(grammars: Grammars, spec: StructuredOutputs, tokens: list[int]) -> bool:
    """Whether an output may be these tokens and end there."""
    held = grammars.constraint(spec)
    for token in tokens:
        mask = np.frombuffer(held.masks(), dtype="<u4")
        if held.done or not mask[token // 32] >> (token % 32) & 1:
            return False
        held.push(token)
    return held.whole


def nested(depth: int) -> str:
    return "(" * depth + "a" + ")" * depth


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (StructuredOutputs(regex=nested(MAX_NESTING + 1)), "regex"),
        (StructuredOutputs(regex="()[]{})))" + "[({" * 21 + "[("), "regex"),  # what closes nothing makes no room
        (StructuredOutputs(grammar=f"start: {nested(MAX_NESTING + 1)}"), "grammar"),
    ],
)
def test_deep_nesting_is_refused(spec: StructuredOutputs, name: str) -> None:
    with pytest.raises(ConstraintError, match=f"^the {name} nests brackets more than 64 deep; flatten it$"):
        grammar_of(spec)


def test_the_largest_nesting_is_accepted() -> None:
    grammar_of(StructuredOutputs(regex=nested(MAX_NESTING) * 2))
    grammar_of(StructuredOutputs(grammar="start: " + nested(MAX_NESTING).replace("a", '"a"')))


def test_a_grammar_that_is_not_gbnf_is_refused_in_one_line() -> None:
    with pytest.raises(ConstraintError, match=r"^the grammar is not GBNF \(.+\); correct it$") as caught:
        grammar_of(StructuredOutputs(grammar='root ::= "a\n| ::='))
    assert "\n" not in str(caught.value)


CASES = {
    "lark": (StructuredOutputs(grammar='start: "a" ("b" | "c")'), ["ab", "ac"], ["a", "b", "abc"]),
    "gbnf": (StructuredOutputs(grammar='root ::= "a" ("b" | "c")'), ["ab", "ac"], ["a", "b", "abc"]),
    "lark with what looks like gbnf": (StructuredOutputs(grammar='start: "a ::= " x\nx: "b ::="'), ["a ::= b ::="], ["a", "b"]),
    "gbnf after a comment": (StructuredOutputs(grammar='# one\n  root::= "a" x-1\nx-1 ::= "b"'), ["ab"], ["a", "x"]),
    "regex": (StructuredOutputs(regex="a[bc]"), ["ab", "ac"], ["a", "b", "abc"]),
    "choice": (StructuredOutputs(choice=("a.c", "水", "a|b")), ["a.c", "水", "a|b"], ["abc", "a", "b"]),
    "object": (StructuredOutputs(json_object=True), ["{}", '{"a": [1]}', '{\n\t"a":1}'], ["[]", "1", '{  "a":1}']),
    "json": (StructuredOutputs(json='{"type": "array"}'), ["[]", '[1, "a"]', "[\r\n  1]"], ["{}", "1", "[   1]"]),
    "compact": (StructuredOutputs(json='{"type": "array"}', disable_any_whitespace=True), ["[]", "[1,2]"], ["[1, 2]", "[\n1]"]),
    "1.0": (StructuredOutputs(json='{"const": 1.0}'), ["1", "1.0"], ["1.00", "1.5", "0.5", "1.25", "10", "-1"]),
    "-10.0": (StructuredOutputs(json='{"enum": [-10.0, 3]}'), ["-10", "-10.0", "3"], ["-9.5", "-10.5", "10.0", "3.0"]),
    "1": (StructuredOutputs(json='{"enum": [1]}'), ["1"], ["1.0"]),
    "a whole number": (StructuredOutputs(json='{"type": "integer"}'), ["10"], ["10.0"]),
    "at least a whole number": (StructuredOutputs(json='{"minimum": 0}'), ["10", "10.0", "10.5"], ["-1", "-1.0"]),
    "1e15": (StructuredOutputs(json='{"const": 1e15}'), ["1000000000000000"], ["1000000000000000.5", "1000000000000001"]),
    "1.0 inside": (
        StructuredOutputs(json='{"const": {"a": [1.0, "x", {"b": 2.0, "c": 0.5}]}}'),
        ['{"a":[1,"x",{"b":2.0,"c":0.5}]}', '{"a":[1.0,"x",{"b":2,"c":0.5}]}'],
        ['{"a":[1,"x",{"b":2.5,"c":0.5}]}', '{"a":[1,"x"]}', '{"a":[1,"x",{"b":2,"c":0.5},1]}', '{"a":[1,"x",{"b":2}]}', "{}"],
    ),
    "1.0 in a list of old drafts": (
        StructuredOutputs(json='{"$schema": "http://json-schema.org/draft-07/schema#", "const": [1.0]}'),
        ["[1]", "[1.0]"],
        ["[]", "[1,1]"],
    ),
    "1.0, not true": (
        StructuredOutputs(json='{"allOf": [{"enum": [{"a": 1.0}]}, {"not": {"enum": [{"a": true}]}}]}'),
        ['{"a": 1.0}', '{"a": 1}'],
        ['{"a": true}', '{"a": 1.5}'],
    ),
    "the schema's order": (
        StructuredOutputs(json='{"type": "object", "properties": {"b": {}, "a": {}}}', open_objects=True),
        ['{"b":1,"a":1}', '{"a":1}', '{"b":1}', '{"b":1,"c":1}'],
        ['{"a":1,"b":1}'],
    ),
    "anything": (StructuredOutputs(json="true"), ["1", "[]", '"a"'], ["a", "[,]"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_text_passes_only_if_it_fits(tokenizer: Tokenizer, name: str) -> None:
    spec, fitting, others = CASES[name]
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    for text in (*fitting, *others):
        assert comes_through(grammars, spec, tokenizer.encode(text, add_special=False)) == (text in fitting), text


@pytest.mark.parametrize("text", ["{", "[1]", "false", json.dumps("a")])
def test_an_invalid_schema_is_refused(text: str) -> None:
    said = "is not JSON" if text == "{" else "must be an object that something fits"
    with pytest.raises(ConstraintError, match=f"the JSON schema {re.escape(said)}"):
        grammar_of(StructuredOutputs(json=text))


@pytest.mark.parametrize("blank", [" ", "\n", "\t", "\r"])
def test_blanks_between_the_parts_of_json_are_bounded(blank: str) -> None:
    """Whoever writes a line break, and then this, wherever either may come, is still at the end soon."""
    schema = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"}},"required":["a","b"]}'

    def blanks(grammar: str) -> int:
        matcher, count = LLMatcher(LLTokenizer("byte"), grammar, log_level=0), 0
        for char in '{"a":1,"b":"x"}':
            for other in ("\n" + blank * MANY) if char not in "axb1" and count < MANY else "":
                if not matcher.validate_tokens([ord(other)]):
                    break
                matcher.consume_token(ord(other))
                count += 1
            matcher.consume_token(ord(char))
        assert matcher.is_accepting()
        return count

    assert 0 < blanks(grammar_of(StructuredOutputs(json=schema))) <= 8 * 25
    free = {"whitespace_pattern": r"[ \t\r\n]+", "lenient": False}
    assert blanks(str(LLMatcher.grammar_from_json_schema(schema, overrides=free))) >= MANY


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
def test_pretty_json_fits(tokenizer: Tokenizer, indent: int | str | None) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    text = json.dumps({"a": [{"b": [1, {"c": "x"}]}, {}]}, indent=indent)
    spec = StructuredOutputs(json_object=True)
    assert comes_through(grammars, spec, tokenizer.encode(text, add_special=False, parse_special=False))


def test_a_lexer_that_failed_for_one_output_does_not_fail_the_next(tokenizer: Tokenizer) -> None:
    """Copies of a matcher share their lexer, which stays broken once it exceeds its limit of work."""
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    spec = StructuredOutputs.of({"regex": "((a{1,99}){1,99}){1,99}"})
    (letter,) = tokenizer.encode("a", add_special=False)
    lengths = []
    for _ in range(2):
        constraint, length = grammars.constraint(spec), 0
        while constraint.masks() and length < 99:
            constraint.push(letter)
            length += 1
        assert constraint.error == "lexer error: too many expressions constructed"
        lengths.append(length)
    assert lengths[0] == lengths[1] > 9


@pytest.mark.parametrize("more", [1, 40, 1000])
def test_ids_that_the_tokenizer_lacks_fit_no_grammar(tokenizer: Tokenizer, more: int) -> None:
    """Models have more logits than tokens; control: the mask has the bits of the tokens alone."""
    spec = StructuredOutputs.of({"regex": "(.|\\n)+"})
    count = tokenizer.vocab_size
    allowed = []
    for size in (count, count + more):
        constraint = Grammars(tokenizer, size, tokenizer.eos_ids).constraint(spec)
        mask = np.unpackbits(np.frombuffer(constraint.masks(), np.uint8), bitorder="little")
        assert len(mask) == 32 * -(-size // 32)
        assert not mask[count:].any()
        allowed.append(mask[:count])
    assert np.array_equal(*allowed)
    assert allowed[0].any()
