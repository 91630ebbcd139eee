"""benchmarks.tool_calls: calls held to a grammar fit their schemas; what counts as valid and as right."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tool_calls as tools
from benchmarks.tool_calls import Case, is_right, json_schema, measure_tools, read_cases
from headrace.decoding.constrained import Grammars
from headrace.decoding.tools import tooling
from headrace.llm import LLM
from headrace.server.protocols.fields import ChatRequest
from headrace.text.dialects.call_formats import HERMES
from headrace.text.tokenizer import Tokenizer
from tests.places import data_path, default_model
from tests.tiny_files import write_tiny_gguf
from tests.unit.vocabularies import byte_level

PARAMETERS = {
    "type": "dict",
    "properties": {
        "turns": {"type": "integer", "minimum": 0, "maximum": 9},
        "speed": {"type": "float", "optional": True, "enum": [0.5, 1.0]},
        "way": {"type": "string", "enum": ["left", "right"]},
    },
    "required": ["turns", "way"],
    "additionalProperties": False,
}
QUESTION = [[{"role": "user", "content": "Turn the wheel left three times."}]]
BFCL = "bfcl/BFCL_v4_simple_python.json"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file of two cases, and their answers beside it."""
    cases = [
        {"id": str(number), "question": QUESTION, "function": [{"name": "mill.turn", "parameters": PARAMETERS}]}
        for number in range(2)
    ]
    answer = {"mill.turn": {"turns": [3], "speed": ["", 1.0], "way": ["left"]}}
    path = tmp_path / "own.json"
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    lines = [json.dumps({"id": case["id"], "ground_truth": [answer]}) + "\n" for case in cases]
    path.with_name(tools.ANSWERS).write_text("".join(lines))
    return path


def test_types_are_normalised() -> None:
    made = json_schema({**PARAMETERS, "properties": {"a": {"type": "tuple", "items": {"type": "any"}}, "b": PARAMETERS}})
    assert (made["type"], made["properties"]["a"]) == ("object", {"type": "array", "items": {}})
    inner = made["properties"]["b"]
    assert (inner["type"], inner["required"]) == ("object", ["turns", "way"])
    assert inner["properties"]["speed"] == {"type": "number", "enum": [0.5, 1.0]}


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"a": "New York, NY", "n": 3}, True),
        ({"a": "new york ny", "n": 3.0, "left out": True}, True),
        ({"a": "New York, NY", "n": "3"}, False),
        ({"a": "York", "n": 3}, False),
        ({"a": "New York, NY"}, False),
        ({"a": "New York, NY", "n": 3, "more": 1}, False),
        ({"a": "New York, NY", "n": True}, False),
        ({"a": "New York, NY", "n": 3, "list": [1, "x"]}, True),
        ({"a": "New York, NY", "n": 3, "list": ["x", 1]}, False),
        ({"a": "New York, NY", "n": 3, "object": {"b": 2}}, True),
        ({"a": "New York, NY", "n": 3, "object": {"b": 4}}, False),
        (None, False),
    ],
)
def test_answers_are_compared_with_alternatives(given: Any, right: bool) -> None:
    answers = {
        "a": ["New York, NY", "NYC"],
        "n": [3],
        "left out": [True, ""],
        "list": [[1, "x"], ""],
        "object": [{"b": [1, 2]}, ""],
    }
    assert is_right(given, answers) is right


def test_a_call_without_its_tags_is_parsed() -> None:
    call = [("f", '{"a": {"name": "x"}}')]
    assert tools.loose_call('So: {"x": {1}}\n```json\n{"name": "f", "arguments": {"a": {"name": "x"}}}\n```') == call
    assert tools.loose_call('{"name": "f", "parameters": {"a": {"name": "x"}}}') == call
    assert tools.loose_call('{"name": "f"} and {"arguments": {}} {') == []


def test_calls_of_a_model_that_knows_nothing_fit(tmp_path: Path, own: Path) -> None:
    """Held to the grammar, even noise is a call that fits; free it is none. The negative control: a schema nothing fits."""
    llm = LLM(write_tiny_gguf(tmp_path / "tiny.gguf", context=1024), kv_cache_memory="16MiB")
    cases = read_cases(own)
    results = measure_tools(llm, cases, at_once=2, max_tokens=200, say=lambda _: None)
    held, free = results["constrained"], results["free"]
    assert (held.cases, held.called, held.valid, held.invalid) == (2, 2, 2, [])
    assert (free.cases, free.called, free.valid, free.right, free.invalid) == (2, 0, 0, 0, ["0", "1"])
    other = [Case(case.id, case.messages, "mill.stop", case.tool, case.answers) for case in cases]
    assert measure_tools(llm, other, max_tokens=200, say=lambda _: None)["constrained"].valid == 0
    llm.close()


def test_the_command(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", context=1024)
    file = tmp_path / "figures.json"
    options = ("--kv-cache-memory", "16MiB", "--most", "1", "--max-tokens", "200", "--json", str(file))
    assert tools.main([str(model), "--data", str(own), *options]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 (100.0%)" in out
    assert "not valid, free: 0" in out
    assert json.loads(file.read_text())["constrained"]["valid"] == 1


def test_answers_that_belong_to_another_file_are_refused(own: Path) -> None:
    own.with_name(tools.ANSWERS).write_text("")
    with pytest.raises(ValueError, match="no answer to 0"):
        read_cases(own)
    own.with_name(tools.ANSWERS).unlink()
    with pytest.raises(ValueError, match="give the file with --answers"):
        read_cases(own)


@pytest.mark.parametrize("line", ['{"id": "1", "question": []}', "[]", "{half a"])
def test_an_invalid_line_is_named(line: str, own: Path) -> None:
    own.write_text(own.read_text() + line + "\n")
    assert len(read_cases(own, most=2)) == 2
    with pytest.raises(ValueError, match="line 3 of .*own.json is no JSON object with function, id, question"):
        read_cases(own)


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_every_known_answer_can_be_written(every: int) -> None:
    """400 grammars, or one of `every`: the right call passes each, and counts as valid and right; with another name it does
    not."""
    tokenizer = Tokenizer.from_gguf(byte_level())
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    cases = read_cases(data_path(BFCL))
    assert len(cases) == 400
    for case in cases[::every]:
        request = ChatRequest(
            model="", messages=case.messages, tools=[case.tool], tool_choice="required", parallel_tool_calls=False
        )
        given = tooling(request, None, lambda _: None)
        assert given is not None
        needed = {name for name, values in case.answers.items() if name in case.schema["required"] or "" not in values}
        ordered = {name: first(case.answers[name]) for name in case.schema["properties"] if name in needed}
        assert is_right(ordered, case.answers), case.id
        for name, fits in ((case.name, True), ("other", False)):
            constraint = grammars.constraint(given.spec)
            body = json.dumps({"name": name, "arguments": ordered}, ensure_ascii=False)
            for token in tokenizer.encode(f"{HERMES.opening}\n{body}{HERMES.closing}", add_special=False, parse_special=False):
                constraint.push(token)
            assert constraint.whole is fits, (case.id, constraint.error, body)


def first(values: list[Any]) -> Any:
    """One known value; an object's own values are lists of what they may be."""
    return one(next(value for value in values if value != ""))


def one(value: Any) -> Any:
    if isinstance(value, list):
        return [one(each) for each in value]
    return {name: each[0] for name, each in value.items()} if isinstance(value, dict) else value


@pytest.mark.weights
def test_the_first_calls_of_a_real_model() -> None:
    cases = read_cases(data_path(BFCL), most=2)
    llm = LLM(default_model(), kv_cache_memory="64MiB", max_model_len=2048)
    results = measure_tools(llm, cases, at_once=2, max_tokens=64, say=lambda _: None)
    assert results["constrained"].valid == 2
    assert results["constrained"].right > results["free"].right
    llm.close()
