"""Calls written as JSON in the text: what is one, and that a stream gives the same as the whole text."""

import json
from typing import Any

import pytest

from headrace.decoding.tools import CallReader, ToolChoice, gathered_calls, tooling
from headrace.text.dialects.call_formats import HERMES, LLAMA3, MISTRAL, CallFormat
from headrace.text.dialects.json_calls import JsonCallFilter

CALL = '{"name": "turn", "arguments": {"turns": 3}}'
ARGUMENTS = '{"turns": 3}'
FENCED = f"```json\n{CALL}\n```"
TOOL: Any = {"type": "function", "function": {"name": "turn", "parameters": {"type": "object", "properties": {}}}}


def read(text: str, size: int, *, several: bool = True, fits: bool = True) -> tuple[str, list[str], list[str]]:
    """The plain text and the arguments of the calls; and what a stream had shown after each piece."""
    reader, pieces, shown = JsonCallFilter(frozenset({"turn"}), several=several), [], []
    steps = [(text[at : at + size], False) for at in range(0, len(text), size)]
    for part, final in [*steps, ("", True)]:
        step = reader.push(part, final=final)
        try:
            next(step)
            while True:
                step.send(fits)
        except StopIteration as end:
            pieces += end.value
        shown.append("".join(piece.text for piece in pieces if piece.call is None))
    plain, calls = gathered_calls(pieces)
    assert {call["function"]["name"] for call in calls} <= {"turn"}
    return plain, [call["function"]["arguments"] for call in calls], shown


@pytest.mark.parametrize("size", [1, 4, 10_000])
@pytest.mark.parametrize(
    ("text", "plain", "calls"),
    [
        (CALL, "", 1),
        (FENCED, "", 1),
        ("```\n" + CALL + "\n```\n", "", 1),
        (f"\n\n{FENCED}\n", "\n\n", 1),
        (FENCED.replace("arguments", "parameters"), "", 1),
        ('{ "arguments": {"turns": 3}, "name" : "turn" }', "", 1),
        (f"I will turn it.\n{FENCED}", "I will turn it.\n", 1),
        (f"I will turn it.\n\n{CALL}\n", "I will turn it.\n\n", 1),
        (f"{FENCED}\nIt turns.", "It turns.", 1),
        (f"{FENCED}\n{FENCED}", "", 2),
        (f"First.\n{FENCED}\nThen.", f"First.\n{FENCED}\nThen.", 0),  # in the middle
        (f"First.\n{FENCED}\n\nThen.\n{CALL}", f"First.\n{FENCED}\n\nThen.\n", 1),
        (f"Say {CALL}", f"Say {CALL}", 0),  # not at the start of a line
        ('{"name": "stop", "arguments": {}}', None, 0),
        ('{"name": "turn", "arguments": {}, "id": 1}', None, 0),
        ('{"name": "turn"}', None, 0),
        ('{"name": "turn", "arguments": "a"}', None, 0),
        ('{"name": "turn", "arguments": {"a": "}"}, }', None, 0),
        ('{"turns": 3}', None, 0),
        ("```python\nprint({1: 2})\n```", None, 0),
        ("``` not a fence", None, 0),
        (FENCED[:-4], "", 1),  # the fence stays open
        (f"```\n{CALL}\n``` and more", "and more", 1),
        (CALL[:-2], None, 0),
        ("{", None, 0),
        ("`a` and {b}\n{c}\n", None, 0),
        ("", None, 0),
    ],
)
def test_json_calls_are_recognized(text: str, plain: str | None, calls: int, size: int) -> None:
    made, arguments, _ = read(text, size)
    assert made == (text if plain is None else plain)
    assert [json.loads(one) for one in arguments] == [{"turns": 3}] * calls


def test_arguments_that_do_not_fit_stay_text() -> None:
    assert read(f"a\n{FENCED}", 5, fits=False)[:2] == (f"a\n{FENCED}", [])


def test_one_call_where_one_is_allowed() -> None:
    assert read(f"{FENCED}\n{FENCED}", 5, several=False)[:2] == (FENCED, [ARGUMENTS])


def test_a_stream_holds_back_no_more_than_it_must() -> None:
    text = 'One.\n{"turns": 3}\nTwo `x`.\n```python\na = 1\n```\n'
    _, _, shown = read(text, 1)
    for number, so_far in enumerate(shown[:-1], 1):
        assert len(so_far) >= number - len("```python\n")
    assert shown[-1] == text


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA3], ids=lambda form: form.name)
def test_only_auto_reads_json(form: CallFormat) -> None:
    template = {"hermes": "{{ tools }}", "mistral": "[TOOL_CALLS] {{ tools }}", "llama3_json": "<|python_tag|> {{ tools }}"}
    for choice, reads in (
        (None, True),
        ("auto", True),
        ("required", False),
        ({"type": "function", "function": {"name": "turn"}}, False),
    ):
        made = tooling(ToolChoice([TOOL], choice), template[form.name], lambda _: None)
        assert made is not None
        assert made.reads_json == reads
    made = tooling(ToolChoice([TOOL], None), template["hermes"], lambda _: None)
    assert made is not None
    reader = CallReader(made)
    steps = reader.push(f"{FENCED}\n<tool_call>\n{CALL}\n</tool_call>", final=True)
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(True)
    _, calls = gathered_calls(end.value.value)
    assert [call["function"]["arguments"] for call in calls] == [ARGUMENTS, ARGUMENTS]
    assert reader.finish_reason("stop") == "tool_calls"
