"""Tool calls that a model writes as a JSON object in its text, bare or in a fence, instead of its template's format.

Such an object counts only at the start or the end of an answer, and only with exactly the keys `name` (one of the tools) and
`arguments` or `parameters`, which fit the tool's schema. Everything else stays text.
"""

import re
from collections.abc import Generator
from dataclasses import dataclass

import msgspec

from headrace.text.dialects.call_parser import Piece

LONGEST_HEAD = 256  # characters up to the first key; a longer beginning is text
LONGEST = 256 << 10  # characters of an object
FENCE = "```"
KEYS = ("name", "arguments", "parameters")
HEAD = re.compile(r'[ \t]*(?P<fence>```[ \t]*\w*[ \t]*\r?\n\s*)?(?P<open>\{)\s*"(?:name|arguments|parameters)"\s*:')
OPEN_FENCE = re.compile(r"`{1,2}|```[ \t]*\w*[ \t]*\r?(?:\n\s*)?")
WHOLE_FENCE = re.compile(r"```[ \t]*\w*[ \t]*\r?\n\s*")
WHOLE_KEY = re.compile(r'"(?:name|arguments|parameters)"\s*')


@dataclass(frozen=True, slots=True)
class CallCandidate:
    """An object that is a call if `arguments` (JSON) fit the schema of the tool `name`."""

    name: str
    arguments: str


Steps = Generator[CallCandidate, bool, list[Piece]]  # yields candidates, receives whether each fits, returns the pieces


class JsonCallFilter:
    """Finds such calls in the plain text of one answer, while it comes. A line that may begin one is held back until it is
    decided: by the first key, by the end of the object, or, in the middle of an answer, by the text after it."""

    def __init__(self, names: frozenset[str], *, several: bool) -> None:
        self.calls = 0
        self._names = names
        self._several = several
        self._held = ""
        self._line_start = True
        self._fresh = True  # nothing but blanks and calls so far
        self._at: int | None = None  # how far the held object was read
        self._depth = 0
        self._in_text = self._escaped = False

    def push(self, text: str, *, final: bool = False) -> Steps:
        shown: list[Piece] = []
        self._held += text
        while self._held:
            if self.calls and self._fresh and self._held[0].isspace():
                self._held = self._held.lstrip()  # between calls
                continue
            if not self._line_start:
                shown.append(self._show_line())
                continue
            end = self._candidate(final)
            if end < 0 and not final:
                break
            if end > 0 and not self._fresh and not final and not self._held[end:].strip():
                break  # it may be the end of the answer
            call = self._read(end) if end > 0 and (self._fresh or not self._held[end:].strip()) else None
            self._at = None
            if call is not None and (yield call):
                shown += [Piece("", self.calls, call.name), Piece(call.arguments, self.calls)]
                self.calls += 1
                self._held, self._line_start = self._held[end:].lstrip(), True
            else:
                self._line_start = False
        return shown

    def _show_line(self) -> Piece:
        at = self._held.find("\n") + 1 or len(self._held)
        text, self._held = self._held[:at], self._held[at:]
        self._line_start = text.endswith("\n")
        self._fresh = self._fresh and not text.strip()
        return Piece(text)

    def _candidate(self, final: bool) -> int:
        """The end of the object at the start of the held text, its fence included; 0 if there is none, -1 if more text
        decides."""
        head = HEAD.match(self._held)
        if head is None:
            return -1 if len(self._held) <= LONGEST_HEAD and _may_begin(self._held) else 0
        if (end := self._object_end(head.start("open"))) < 0:
            return -1 if len(self._held) <= LONGEST else 0
        if head["fence"] is None:
            return end
        rest = self._held[end:].lstrip()
        if rest.startswith(FENCE):
            return len(self._held) - len(rest) + len(FENCE)
        if final and not rest:
            return end  # the answer ends before its fence does
        return -1 if FENCE.startswith(rest) else 0

    def _object_end(self, start: int) -> int:
        """The end of the object that begins at `start`, -1 while it is open. Continues from the last call."""
        if self._at is None:
            self._at, self._depth, self._in_text, self._escaped = start, 0, False, False
        while self._at < len(self._held) and (self._depth or self._at == start):
            char = self._held[self._at]
            self._at += 1
            if self._in_text:
                self._in_text = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            else:
                self._in_text = char == '"'
                self._depth += (char in "{[") - (char in "}]")
        return -1 if self._depth else self._at

    def _read(self, end: int) -> CallCandidate | None:
        if self.calls and not self._several:
            return None
        text = self._held[:end].strip().removeprefix(FENCE).removesuffix(FENCE)
        try:
            fields = msgspec.json.decode(text[text.index("{") :].encode(), type=dict[str, msgspec.Raw])
            if len(fields) != 2 or "name" not in fields:
                return None
            name = msgspec.json.decode(fields.pop("name"))
            (key,) = fields
            arguments = bytes(fields[key]).decode()
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return None
        fits = name in self._names if isinstance(name, str) else False
        return CallCandidate(name, arguments) if fits and key in KEYS and arguments.startswith("{") else None


def _may_begin(text: str) -> bool:
    """Whether more text can make it the head of an object."""
    text = text.lstrip(" \t")
    if text.startswith("`"):
        if OPEN_FENCE.fullmatch(text):
            return True
        fence = WHOLE_FENCE.match(text)
        text = "" if fence is None else text[fence.end() :]
        if fence is None:
            return False
    if not text:
        return True
    inner = text[1:].lstrip()
    return text.startswith("{") and (
        any(f'"{key}"'.startswith(inner) for key in KEYS) or WHOLE_KEY.fullmatch(inner) is not None
    )
