"""Reasoning in tags is told apart from the answer, however the text is cut."""

import pytest

from headrace.text.dialects.reasoning import (
    FORMATS,
    GRANITE_THINK,
    MISTRAL_THINK,
    SEED_THINK,
    THINK,
    ReasoningFormat,
    ReasoningSplitter,
    reasoning_of,
)

THOUGHT, ANSWER = "First *this*.\n\nThen < that </thin.", "An answer with <think> in it.\n"


def split(parts: list[str], form: ReasoningFormat, inside: bool = False) -> tuple[str, str]:
    """Reasoning and answer of a text that comes in parts."""
    splitter = ReasoningSplitter(form, inside=inside)
    pieces = [piece for at, part in enumerate(parts) for piece in splitter.push(part, final=at == len(parts) - 1)]
    order = [piece.reasoning for piece in pieces]
    assert order == sorted(order, reverse=True)
    assert all(piece.text for piece in pieces)
    return (
        "".join(piece.text for piece in pieces if piece.reasoning),
        "".join(piece.text for piece in pieces if not piece.reasoning),
    )


def cuts(text: str) -> list[list[str]]:
    return [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.closing)
@pytest.mark.parametrize("inside", [False, True])
def test_a_text_is_split_however_it_is_cut(form: ReasoningFormat, inside: bool) -> None:
    opening = "" if inside else form.opening
    for parts in cuts(f"{opening}\n{THOUGHT}\n{form.closing}\n\n{ANSWER}"):
        assert split(parts, form, inside) == (THOUGHT, ANSWER), parts


def test_tags_around_the_answer_are_dropped_however_it_is_cut() -> None:
    """The closing tag may be missing, and so may the reasoning; later text is kept. Control: another format leaves the tags."""
    thought, answer = f"<think>{THOUGHT}</think>", "Left < right, </res\n\n2."
    cases = {
        f"{thought}\n<response>\n{answer}\n</response>\n": (THOUGHT, answer),
        f"{thought}<response>{answer}</response>": (THOUGHT, answer),
        f"{thought}\n\n<response>{answer}": (THOUGHT, answer),
        f"<response>{answer}</response> \n": ("", answer),
        f"{thought}{answer}": (THOUGHT, answer),
        f"{thought}<response>{answer}</response>\nPS": (THOUGHT, f"{answer}\nPS"),
        f"{answer}<response>no</response>": ("", f"{answer}<response>no</response>"),
        f"{thought}<resp": (THOUGHT, "<resp"),
    }
    for text, expected in cases.items():
        for parts in cuts(text):
            assert split(parts, GRANITE_THINK) == expected, parts
    text = f"{thought}<response>{answer}</response>"
    assert split([text], THINK) == (THOUGHT, f"<response>{answer}</response>")


def test_a_text_without_reasoning_stays_as_it_is() -> None:
    for text in ("The mill.\n", "  <thin air", "<b>", " \n"):
        for parts in cuts(text):
            assert split(parts, THINK) == ("", text), parts
    assert split(["Well, <think>no</think>"], THINK) == ("", "Well, <think>no</think>"), "only at the beginning"


def test_reasoning_without_an_end_has_no_answer() -> None:
    assert split(list("<think>\nI wonder </th"), THINK) == ("I wonder </th", "")
    assert split(list("<think>\n\n</think>\n\nYes."), THINK) == ("", "Yes.")
    assert split(["I think"], THINK, inside=False) == ("", "I think")  # control: the same text from inside
    assert split(["I think"], THINK, inside=True) == ("I think", "")


def test_tags_that_are_control_tokens_are_seen_by_their_ids() -> None:
    """Texts lack them. Control: without the ids everything is answer."""
    words = {7: "First ", 8: "this.", 9: "An ", 10: "answer"}
    for step in (1, 2, 3, 6):
        for ids, expected in (((1, 2), ("First this.", "An answer")), ((None, None), ("", "First this.An answer"))):
            splitter, tokens = ReasoningSplitter(MISTRAL_THINK, ids=ids), [1, 7, 8, 2, 9, 10]
            pieces = []
            for at in range(0, len(tokens), step):
                part = tokens[at : at + step]
                text = "".join(words.get(token, "") for token in part)
                pieces += splitter.push(text, part, lambda ids: "".join(words.get(id, "") for id in ids), final=at + step >= 6)
            found = tuple("".join(one.text for one in pieces if one.reasoning is kind) for kind in (True, False))
            assert found == expected, step


def test_the_template_names_the_format() -> None:
    assert reasoning_of("{{ messages }}<think>\n") == THINK
    assert reasoning_of("{% if '</think>' in content %}") == THINK
    assert reasoning_of("[THINK]' + block['thinking'] + '[/THINK]") == MISTRAL_THINK
    assert reasoning_of("{%- set think_begin_token = '<seed:think>' -%}") == SEED_THINK
    assert (
        reasoning_of("thoughts between <think></think> and write your response between <response></response>") == GRANITE_THINK
    )
    assert reasoning_of("{{ messages }}") is None
    assert reasoning_of("<response></response>") is None
    assert reasoning_of(None) is None
