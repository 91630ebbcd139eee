"""Arguments that were cut off are objects again."""

import json

import msgspec
import pytest

from headrace.text.dialects.truncated_json import REPAIRED, ArgumentsReader, close_object

WHOLE = {"city": 'Pa"r\\is\n', "n": [1, -2.5, {"a": None, "b": True}], "é": "\U0001f600", "": {}}


@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_beginning_of_an_object_is_closed(ascii_only: bool) -> None:
    text = json.dumps(WHOLE, ensure_ascii=ascii_only)
    seen = set()
    for end in range(1, len(text) + 1):
        closed = close_object(text[:end])
        assert closed is not None
        made = json.loads(closed)
        assert set(made) <= set(WHOLE)
        assert all(WHOLE["city"].startswith(value) for name, value in made.items() if name == "city")  # type: ignore[attr-defined]
        assert msgspec.json.decode(closed.encode()) == made  # no lone surrogate
        seen.add(closed)
    assert json.loads(closed) == WHOLE
    assert len(seen) >= 20


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ('{"city": "Paris', {"city": "Paris"}),
        ('{"city": "Paris", "co', {"city": "Paris"}),
        ('{"a": tru', {}),
        ('{"a": 12', {"a": 12}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": "x\\ud83d', {"a": "x"}),
        ("[1]", [1]),
        ("Paris", {"arguments": "Paris"}),
        ("[1", {"arguments": "[1"}),
        ('{"a" 1', {"arguments": '{"a" 1'}),
        ('{"a": 1}}', {"a": 1}),
        ('{"a": "\\x', {"arguments": '{"a": "\\x'}),
        ("{]", {"arguments": "{]"}),
        ('{"a": ' * 100_000, {"arguments": '{"a": ' * 100_000}),
    ],
)
def test_arguments(text: str, value: object) -> None:
    assert ArgumentsReader(msgspec.json.decode).read(text) == value


def test_a_conversation_repairs_a_bounded_number_of_characters() -> None:
    reader = ArgumentsReader(msgspec.json.decode)
    half = '{"a": "' + "x" * (REPAIRED // 2 - 7)
    assert set(reader.read(half)) == {"a"}
    assert set(reader.read(half)) == {"a"}
    assert reader.read('{"a": "x') == {"arguments": '{"a": "x'}  # nothing is left
    assert reader.read('{"a": 1}') == {"a": 1}  # complete arguments need no repair
