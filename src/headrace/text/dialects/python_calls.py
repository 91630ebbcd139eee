"""Parser of calls as Python: `name(key="value", other=3)`, one a line between two tags (OLMo 3).

A value is JSON, as the template writes it, or a Python literal. Arguments are shown value by value, as JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.text.dialects.call_formats import CallFormat
from headrace.text.dialects.call_parser import MAX_HEAD, CallParser, Piece

NAME = re.compile(r"\s*([^\W\d][\w.-]{0,127})[ \t]*\(")
NAME_PART = re.compile(r"(?:[^\W\d][\w.-]{0,127}[ \t]*)?")
KEY = re.compile(r"\s*(?:,\s*)?([^\s=,()'\"\[\]{}]{1,256})\s*=(?!=)\s*")
KEY_PART = re.compile(r"\s*(?:,\s*)?[^\s=,()'\"\[\]{}]{0,256}\s*")
# Parts of a literal: a text in quotes, a word, a bracket, anything else.
LITERAL = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[A-Za-z_]\w*|[()\[\]{}]|[^'\"A-Za-z_()\[\]{}]+", re.DOTALL)
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
WORDS = {"True": "true", "False": "false", "None": "null"}
BRACKETS = {"(": "[", ")": "]"}  # a tuple
LAST_COMMA = re.compile(r",\s*$")


class PythonCallParser(CallParser):
    """A `CallParser` of a format with `python`. parameters: names of each tool's parameters, for values without a key."""

    def __init__(self, form: CallFormat, parameters: Mapping[str, Sequence[str]], *, held: bool = False) -> None:
        super().__init__(form, held=held)
        self._names = parameters
        self._name = self._key = ""
        self._count = 0  # arguments of the current call
        self._literal: list[str] = []  # the current argument, read so far
        self._quote = ""
        self._opened = ""  # right after the opening tag: it and the whitespace before it

    @property
    def unfinished(self) -> bool:
        return self._state in ("parameters", "argument") or super().unfinished

    def close(self) -> list[Piece]:
        pieces = super().close()
        if self._state == "head" and self._opened:
            return [Piece(self._opened), *pieces]
        return pieces

    def _text(self, pieces: list[Piece]) -> bool:
        before = "".join(self._blanks) + self._held[: max(0, self._held.find(self.form.opening))]
        again = super()._text(pieces)
        self._opened = before[len(before.rstrip()) :] + self.form.opening if self._state == "head" else ""
        return again

    def _head(self, pieces: list[Piece]) -> bool:
        """The name of a function and its bracket, or the closing tag."""
        lead, closing = self._held.lstrip(), self.form.closing
        if lead.startswith(closing):
            self._held, self._state = lead.removeprefix(closing), "text"
            return True
        match = NAME.match(lead)
        if match is None:
            if NAME_PART.fullmatch(lead) or closing.startswith(lead):
                return False
            if self._opened:  # the tag was text
                pieces.append(Piece(self._opened))
            self._state = "text"
            return True
        self._blanks, self._name, self._count, self._opened = [], match[1], 0, ""
        pieces += [Piece("", self.calls, self._name), Piece("{", self.calls)]
        self.calls += 1
        self._held, self._state = lead[match.end() :], "parameters"
        return True

    def _parameters(self, pieces: list[Piece]) -> bool:
        """The key of an argument, or the end of the call."""
        lead = self._held.lstrip().removeprefix(",").lstrip()
        if lead.startswith(")"):
            pieces.append(Piece("}", self.calls - 1))
            self._held, self._state = lead[1:], "tail"
            return True
        match = KEY.match(self._held)
        if match is None and KEY_PART.fullmatch(self._held) and len(self._held) <= MAX_HEAD:
            return False
        names = self._names.get(self._name, ())
        unnamed = names[self._count] if self._count < len(names) else f"argument{self._count + 1}"
        self._key = unnamed if match is None else match[1]
        self._held, self._state = lead if match is None else self._held[match.end() :], "argument"
        self._literal, self._quote, self._escaped, self._depth = [], "", False, 0
        return True

    def _argument(self, pieces: list[Piece]) -> bool:
        """A value, up to a comma or the closing bracket."""
        end = self._end_of_value()
        self._literal.append(self._held[:end])
        if end is None:
            self._held = ""
            return False
        between = ", " if self._count else ""
        pieces.append(Piece(f"{between}{json.dumps(self._key)}: {as_json(''.join(self._literal))}", self.calls - 1))
        self._count += 1
        self._held, self._state = self._held[end:], "parameters"
        return True

    def _end_of_value(self) -> int | None:
        """Where the value ends in the held text; None if it does not."""
        for at, char in enumerate(self._held):
            if self._quote:
                if self._escaped or char == "\\":
                    self._escaped = not self._escaped
                elif char == self._quote:
                    self._quote = ""
            elif char in "'\"":
                self._quote = char
            elif self._depth == 0 and char in ",)":
                return at
            else:
                self._depth += (char in "([{") - (char in ")]}")
        return None

    def _tail(self, pieces: list[Piece]) -> bool:
        """Between two calls, or before the closing tag."""
        self._held = self._held.lstrip(" \t\r\n,;")
        self._state = "head"
        return bool(self._held)


def as_json(literal: str) -> str:
    """A literal of JSON or Python as JSON; a text that is neither, as a JSON string."""
    bare = literal.strip()
    for read in (str, _from_python):
        try:
            return json.dumps(json.loads(read(bare), strict=False, parse_constant=_refuse), ensure_ascii=False)
        except (ValueError, RecursionError):
            continue
    return json.dumps(bare, ensure_ascii=False)


def _from_python(literal: str) -> str:
    """JSON with the structure of a Python literal."""
    parts: list[str] = []
    for part in LITERAL.findall(literal):
        if part[0] in "'\"":
            parts.append(json.dumps(ESCAPE.sub(_unescaped, part[1:-1])))
            continue
        if part in (")", "]", "}") and parts:
            parts[-1] = LAST_COMMA.sub("", parts[-1])
        parts.append(WORDS.get(part, BRACKETS.get(part, part)))
    return "".join(parts)


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else ESCAPED.get(code, code)


def _refuse(text: str) -> Any:
    raise ValueError(text)
