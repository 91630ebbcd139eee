"""A call equal to an earlier one ends an answer, and no part of it is shown."""

import pytest

from headrace.decoding.tools import gathered_calls
from headrace.text.dialects.call_formats import HERMES, LLAMA3, CallFormat
from headrace.text.dialects.call_parser import CallParser, RepeatFilter


def text_of(form: CallFormat, *calls: tuple[str, str]) -> str:
    bodies = [f'{{"name": "{name}", "{form.key}": {arguments}}}' for name, arguments in calls]
    if not form.opening:
        return form.between.join(bodies)
    return form.between.join(f"{form.opening}\n{body}{form.closing}" for body in bodies)


@pytest.mark.parametrize("form", [HERMES, LLAMA3], ids=lambda form: form.name)
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("calls", "kept", "ended"),
    [
        ([("a", '{"x": 1}'), ("a", '{"x": 1}'), ("b", "{}")], 1, True),
        ([("a", '{"x": 1}'), ("a", '{"x": 12}'), ("b", '{"x": 1}')], 3, False),
        ([("a", '{"x": 1}'), ("b", "{}"), ("a", '{"x": 2}'), ("b", "{}")], 3, True),
        ([("a", '{"x": "}"}'), ("a", '{"x": "}"}')], 1, True),
        ([("a", '{"x": "a b"}'), ("a", '{ "x":\n"a b" }')], 1, True),
        ([("a", '{"x": "a b"}'), ("a", '{"x": "ab"}')], 2, False),
    ],
)
def test_repeated_calls(form: CallFormat, size: int, calls: list[tuple[str, str]], kept: int, ended: bool) -> None:
    text, reader, repeats, shown = text_of(form, *calls), CallParser(form), RepeatFilter(), []
    for at in range(0, len(text), size):
        shown += repeats.push(reader.push(text[at : at + size]))
        if repeats.ended:
            break
    shown += [*repeats.push(reader.close()), *repeats.close()]
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in gathered_calls(shown)[1]]
    assert (made, repeats.ended) == (calls[:kept], ended)


def test_an_unfinished_repetition_is_shown() -> None:
    text = text_of(HERMES, ("a", '{"x": 1}'), ("a", '{"x": 1}'))
    reader, repeats = CallParser(HERMES), RepeatFilter()
    cut = text[: text.rindex("1")]
    first = repeats.push(reader.push(cut))
    assert len(gathered_calls(first)[1]) == 1
    _, calls = gathered_calls([*first, *repeats.push(reader.close()), *repeats.close()])
    assert [call["function"]["arguments"] for call in calls] == ['{"x": 1}', '{"x": ']
    assert reader.unfinished
