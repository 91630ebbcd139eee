"""Parser of calls that begin with a name: `[TOOL_CALLS]name[ARGS]{…}` (Mistral), or a line `name` and then `{…}` (GLM-4).

The tags are control tokens in most vocabularies, and then missing in the text: a line that begins with the name of a tool and
a brace is a call without them, too.
"""

import re
from collections.abc import Iterable

from headrace.text.dialects.call_formats import CallFormat
from headrace.text.dialects.call_parser import MAX_HEAD, CallParser, Piece, begun_length

# Between name and arguments, and what may become it.
TAGS = r"(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?[ \t\r]*\n?[ \t]*"
PART = re.compile(r"(?:\[[A-Z_]{0,7}|\[CALL_ID\]\w{0,64}(?:\[[A-Z]{0,4}\]?)?|\[ARGS\])?[ \t\r]*\n?[ \t]*")


class NamedCallParser(CallParser):
    """A `CallParser` of a format with `named`. names: of the tools."""

    def __init__(self, form: CallFormat, names: Iterable[str], *, held: bool = False) -> None:
        super().__init__(form, held=held)
        self._names = sorted(names, key=len, reverse=True)
        opening = f"(?:{re.escape(form.opening)})?" if form.opening else ""
        self._call_head = re.compile(rf"\s*{opening}\s*({'|'.join(map(re.escape, self._names))}){TAGS}(?=\{{)")
        self._may_call = True  # at the beginning of a line, or at an opening
        self._refused = False  # the held text begins with an opening that is none

    def _start(self, pieces: list[Piece]) -> bool:
        self._state = "text"
        return bool(self._held)

    def _text(self, pieces: list[Piece]) -> bool:
        """Plain text up to a call."""
        if not self._held:
            return False
        if self._may_call:
            return self._call_or_text(pieces)
        opening, held = self.form.opening, self._held
        places = [held.find(opening, int(self._refused)) if opening else -1, held.find("\n") + 1 or -1]
        ends = [at for at in places if at >= 0]
        end = min(ends) if ends else len(held) - begun_length(held, opening)
        self._show(pieces, held[:end])
        self._held, self._may_call, self._refused = held[end:], bool(ends), self._refused and not end
        return bool(ends)

    def _call_or_text(self, pieces: list[Piece]) -> bool:
        match = self._call_head.match(self._held)
        if match is not None:
            self._blanks = []
            pieces.append(Piece("", self.calls, match[1]))
            self.calls += 1
            self._held, self._state, self._depth = self._held[match.end() :], "arguments", 0
            return True
        lead = self._held.lstrip()
        if len(lead) <= MAX_HEAD and self._may_begin(lead):
            self._blanks.append(self._held[: len(self._held) - len(lead)])
            self._held = lead
            return False
        self._may_call, self._refused = False, True
        if self._plain_else and not self.calls:
            self._state = "plain"
        return True

    def _may_begin(self, lead: str) -> bool:
        """Whether more text may make a call of it."""
        opening = self.form.opening
        if opening and lead and opening.startswith(lead):
            return True
        name = lead.removeprefix(opening).lstrip() if opening else lead
        if any(each.startswith(name) for each in self._names):
            return True
        return any(name.startswith(each) and PART.fullmatch(name[len(each) :]) for each in self._names)

    def _show(self, pieces: list[Piece], text: str) -> None:
        """Show text; whitespace waits for text after it, as it is dropped before a call."""
        plain = text.rstrip()
        if plain:
            shown = "".join([*self._blanks, plain])
            pieces.append(Piece(shown.lstrip() if self.calls else shown))
            self._blanks = []
        if blank := text[len(plain) :]:
            self._blanks.append(blank)

    def _tail(self, pieces: list[Piece]) -> bool:
        self._state, self._may_call = "text", True
        return bool(self._held)
