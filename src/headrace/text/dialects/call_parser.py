"""A parser that finds tool calls in a model's text while it comes, and a filter of repeated calls."""

import re
import secrets
import string
from dataclasses import dataclass

from headrace.text.dialects.call_formats import LEADS, CallFormat

MAX_HEAD = 1024  # characters up to the end of a call's name
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')


@dataclass(slots=True)
class Piece:
    """The next part of a text: plain text, reasoning, or of call number `call` its name (at its beginning) or arguments."""

    text: str
    call: int | None = None
    name: str | None = None
    reasoning: bool = False


def begun_length(text: str, tag: str) -> int:
    """Length of the longest end of a text with which `tag` may begin; more text may complete it."""
    return next((n for n in range(min(len(tag), len(text)), 0, -1) if text.endswith(tag[:n])), 0)


class CallParser:
    """Splits the text of one answer while it comes, in linear time. It holds back only a possible opening, and whitespace,
    which is dropped before a call."""

    def __init__(self, form: CallFormat, *, held: bool = False) -> None:
        """held: an answer is calls, or a text of a format, in which nothing is a call."""
        self.form = form
        self._plain_else = held
        self.calls = 0
        self._held = ""
        # White space before the held text.
        self._blanks: list[str] = []
        self._state = "start"
        self._depth = 0
        self._in_text = self._escaped = self._ended = False

    @property
    def unfinished(self) -> bool:
        """Whether the text ends inside a call."""
        return self._state == "arguments" or (self._state in ("call", "head") and bool(self._held.strip()))

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while getattr(self, f"_{self._state}")(pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        """The held text at the end of the answer."""
        held = "".join([*self._blanks, self._held])
        return [Piece(held)] if held and self._state in ("start", "text", "head") and (self.calls == 0 or held.strip()) else []

    def _start(self, pieces: list[Piece]) -> bool:
        """At the beginning: an opening, a brace that opens a call, or text."""
        lead = self._held.lstrip()
        self._blanks.append(self._held[: len(self._held) - len(lead)])
        self._held = lead
        if not lead:
            return False
        opening = self.form.opening
        if self._plain_else and not lead.startswith(opening):
            self._state = "start" if opening.startswith(lead) else "plain"
            return self._state == "plain"
        for tag in LEADS.get(self.form.name, ()):
            if lead.startswith(tag):
                self._held, self._state = lead.removeprefix(tag), "call" if self.form.listed else "head"
                return True
            if tag.startswith(lead):
                return False
        if not self.form.opening:
            self._state = "head" if lead.startswith("{") else "text"
        elif self.form.listed and lead.startswith("["):
            if re.match(r'\[\s*\{\s*"name"', lead):
                self._state = "call"
            elif len(lead) > 40 or not re.fullmatch(r'\[\s*(?:\{\s*(?:"(?:n(?:a(?:me?)?)?)?)?)?', lead):
                self._state = "text"
            else:
                return False
        else:
            self._state = "text"
        return True

    def _text(self, pieces: list[Piece]) -> bool:
        """Plain text up to an opening."""
        opening, held = self.form.opening, self._held
        at = held.find(opening) if opening else -1
        text = held[:at] if at >= 0 else held[: len(held) - begun_length(held, opening)]
        plain = text.rstrip() if opening else text
        if plain or not opening:
            plain = "".join([*self._blanks, plain])
            self._blanks = []
        if plain := plain.lstrip() if at >= 0 and self.calls else plain:
            pieces.append(Piece(plain))
        if at < 0:
            self._blanks.append(text[len(text.rstrip()) :] if opening else "")
            self._held = held[len(text) :]
            return False
        self._blanks = []
        self._held, self._state = held[at + len(opening) :], "call" if self.form.listed else "head"
        return True

    def _plain(self, pieces: list[Piece]) -> bool:
        """An answer of a format, unchanged."""
        if plain := "".join([*self._blanks, self._held]):
            pieces.append(Piece(plain))
        self._blanks, self._held = [], ""
        return False

    def _call(self, pieces: list[Piece]) -> bool:
        """The opening bracket of a list of calls."""
        self._held = self._held.lstrip()
        if not self._held:
            return False
        self._held, self._state = self._held.removeprefix("["), "head"
        return True

    def _head(self, pieces: list[Piece]) -> bool:
        """{"name": "…", "arguments": — nothing is shown before it is complete."""
        match = HEAD.match(self._held) if ":" in self._held else None
        if match is None:
            if len(self._held) <= MAX_HEAD:
                return False
            self._state = "text"
            return True
        self._blanks = []
        pieces.append(Piece("", self.calls, match[1]))
        self.calls += 1
        self._held, self._state, self._depth = self._held[match.end() :], "arguments", 0
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        """A JSON value, shown as it comes, up to its end."""
        if self._depth == 0 and not self._in_text:
            self._held = self._held.lstrip()
        for at, char in enumerate(self._held):
            if self._in_text:
                self._in_text = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
                continue
            self._in_text = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            if self._depth <= 0 and char in "}]":
                ends = at + (self._depth == 0)
                if self._held[:ends]:
                    pieces.append(Piece(self._held[:ends], self.calls - 1))
                self._held, self._state = self._held[ends:], "tail"
                return True
        if self._held:
            pieces.append(Piece(self._held, self.calls - 1))
            self._held = ""
        return False

    def _tail(self, pieces: list[Piece]) -> bool:
        """The rest of a call; another call or text follows."""
        after = self._held.lstrip()
        if not self._ended and after.startswith("}"):
            self._ended, after = True, after[1:].lstrip()
        self._held = after
        if self.form.opening and not self.form.listed:
            closing = self.form.closing.strip()
            if len(after) < len(closing) and closing.startswith(after):
                return False
            self._held, self._state, self._ended = after.removeprefix(closing), "text", False
            return True
        if not after:
            return False
        self._ended = False
        if after[0] in ",;":
            self._held, self._state = after[1:], "head"
            return True
        self._held, self._state = after[1:] if after[0] == "]" else after, "closing" if self.form.closing else "text"
        return True

    def _closing(self, pieces: list[Piece]) -> bool:
        """The closing tag after a list of calls, which may be missing."""
        after, closing = self._held.lstrip(), self.form.closing
        if len(after) < len(closing) and closing.startswith(after):
            return False
        self._held, self._state = after.removeprefix(closing), "text"
        return True


def new_call_id() -> str:
    """A random call id of nine letters and digits, the only form Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class RepeatFilter:
    """Ends an answer at the first call with the name and arguments of an earlier one; whitespace between JSON tokens does not
    count. The pieces of a call are held back while they equal an earlier call, so no stream shows a repeated call. A model
    that must call may repeat one without end."""

    def __init__(self) -> None:
        self.ended = False
        self._calls: list[tuple[str, str]] = []  # names and arguments
        self._held: list[Piece] = []
        self._in_text = self._escaped = False

    def push(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces that can be shown now."""
        shown: list[Piece] = []
        for piece in pieces:
            if self.ended:
                break
            shown += self._take(piece)
        return shown

    def close(self) -> list[Piece]:
        """The held pieces at the end of the text: an unfinished call is not a repetition."""
        held, self._held = ([] if self.ended else self._held), []
        return held

    def _take(self, piece: Piece) -> list[Piece]:
        if piece.call is None:
            return [*self.close(), piece]
        shown = self.close() if piece.name is not None else []
        if piece.name is not None:
            self._calls.append((piece.name, ""))
            self._in_text = self._escaped = False
        name, arguments = self._calls[-1]
        arguments += self._without_blanks(piece.text)
        self._calls[-1] = name, arguments
        earlier = [other for known, other in self._calls[:-1] if known == name and other.startswith(arguments)]
        if not earlier:
            shown += [*self.close(), piece]
        elif arguments and arguments in earlier:  # a JSON object ends where its text does
            self.ended, self._held = True, []
        else:
            self._held.append(piece)
        return shown

    def _without_blanks(self, text: str) -> str:
        kept = []
        for char in text:
            if self._in_text:
                self._in_text = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char.isspace():
                continue
            else:
                self._in_text = char == '"'
            kept.append(char)
        return "".join(kept)
