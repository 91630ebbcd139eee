"""Prompts that end inside the last message, which the model continues."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headrace.text.chat import TemplateError, validate_messages

Message = Mapping[str, Any]


def check_continues(talks: Iterable[Sequence[Message]]) -> None:
    """Raise TemplateError unless the last message of each conversation is text of the assistant."""
    for *_, last in talks:
        if last["role"] != "assistant":
            raise TemplateError(
                "continue_final_message: the last message is not the assistant's; end with one of the assistant",
                "continue_final_message",
            )
        if last.get("tool_calls"):
            raise TemplateError(
                "continue_final_message: the last message calls tools and has no text; add the tools' results",
                "continue_final_message",
            )


def render_open(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> str:
    """Return the prompt of a conversation up to the end of its last message's text.

    render: applies the template without opening a new turn. A random mark after the text shows where to cut.
    Raises TemplateError if the template drops the mark.
    """
    messages = validate_messages(messages)
    check_continues([messages])
    *earlier, last = messages
    mark = secrets.token_hex(16)
    before, separator, _ = render([*earlier, {**last, "content": last["content"] + mark}]).rpartition(mark)
    if not separator or mark in before:
        raise TemplateError(
            "continue_final_message: the model's template does not allow it; leave it out", "continue_final_message"
        )
    return before
