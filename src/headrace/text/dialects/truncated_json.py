"""Closes JSON objects that were cut off, so that a chat template can render them as objects."""

import re
from collections.abc import Callable
from typing import Any

import msgspec

TOKEN = re.compile(r'\s+|"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|[{}\[\]:,]')
OPEN_TEXT = re.compile(r'"(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
OPEN_ESCAPE = re.compile(r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?")  # what may follow it
HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")
CLOSERS = {"{": "}", "[": "]"}
REPAIRED = 16 << 10  # characters of one conversation that are repaired: Python looks at each, on the server's event loop


class ArgumentsReader:
    """Reads the arguments of one conversation's calls."""

    def __init__(self, read: Callable[[bytes], Any]) -> None:
        """read: parses JSON. It raises msgspec.DecodeError, ValueError or RecursionError."""
        self._parse = read
        self._left = REPAIRED

    def read(self, text: str) -> Any:
        """The arguments as a value. Arguments that were cut off keep their complete parts and the beginning of their last
        string, up to REPAIRED characters in a conversation. Any other text becomes {"arguments": text}."""
        try:
            return self._parse((text or "{}").encode())
        except (msgspec.DecodeError, ValueError, RecursionError):
            pass
        if len(text) > self._left:
            return {"arguments": text}
        self._left -= len(text)
        try:
            return {"arguments": text} if (closed := close_object(text)) is None else self._parse(closed.encode())
        except (msgspec.DecodeError, ValueError, RecursionError):
            return {"arguments": text}


def close_object(text: str) -> str | None:
    """The longest JSON object that a prefix of `text` with added brackets forms; None if `text` begins no object."""
    at, stack, wanted = 0, "", "value"  # next: "value", "key", "colon", or "end" (of a value: a comma or a bracket)
    safe: tuple[int, str] | None = None
    while match := TOKEN.match(text, at):
        token = match[0]
        at = match.end()
        if token.isspace():
            continue
        if (step := _step(token, stack, wanted)) is None:
            return None
        stack, wanted = step
        if wanted == "end" or token in CLOSERS:
            safe = at, stack
        if not stack:
            break
    if safe is None or not text.lstrip().startswith("{"):
        return None
    if stack and wanted == "value" and (part := OPEN_TEXT.match(text, at)) is not None:
        if OPEN_ESCAPE.fullmatch(text, part.end()) is None:
            return None
        return f'{text[:at]}{HIGH_SURROGATE.sub("", part[0])}"{_closing(stack)}'
    return text[: safe[0]] + _closing(safe[1])


def _step(token: str, stack: str, wanted: str) -> tuple[str, str] | None:
    """The open brackets and the next expected token after a token; None if the token is not allowed here."""
    top = stack[-1:]
    if token in CLOSERS and wanted == "value":
        return stack + token, "key" if token == "{" else "value"
    if token in CLOSERS.values():
        return (stack[:-1], "end") if top and CLOSERS[top] == token else None
    if token == ",":
        return (stack, "key" if top == "{" else "value") if wanted == "end" and top else None
    if token == ":":
        return (stack, "value") if wanted == "colon" else None
    if wanted == "key":
        return (stack, "colon") if token[0] == '"' else None
    return (stack, "end") if wanted == "value" else None


def _closing(stack: str) -> str:
    return "".join(CLOSERS[bracket] for bracket in reversed(stack))
