"""Calls of tools in a model's text: where they begin and end, as the text comes."""

import re
from dataclasses import dataclass

MOST_HEAD = 4096  # characters within which a call must say its name
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls: `opening` {"name": …, `key`: {…}} `closing`, and `between` two of them.

    Where there is no opening, an answer that begins with a brace is a call. `listed`: calls stand in one JSON list.
    """

    name: str
    opening: str
    closing: str
    key: str
    between: str
    listed: bool = False


HERMES = CallFormat("hermes", "<tool_call>", "\n</tool_call>", "arguments", "\n")
LLAMA3 = CallFormat("llama3_json", "", "", "parameters", "; ")
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", "", "arguments", ", ", listed=True)
LEADS = {"llama3_json": ("<|python_tag|>",), "mistral": ("[TOOL_CALLS]",)}  # may stand before calls that need no opening


def format_of(template: str | None) -> CallFormat | None:
    """The format a chat template speaks of; None where it knows no tools."""
    if template is None or "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA3 if "<|python_tag|>" in template or '"parameters": ' in template else HERMES


@dataclass(slots=True)
class Piece:
    """What a text's next part is: plain text, or of call number `call` its name (at its beginning) or arguments."""

    text: str
    call: int | None = None
    name: str | None = None


class ToolText:
    """The text of one answer, taken apart while it comes. Only a text that could still be an opening is held back."""

    def __init__(self, form: CallFormat) -> None:
        self.form = form
        self.calls = 0
        self._held = ""
        self._state = "start"
        self._depth = 0
        self._in_text = self._escaped = False

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while getattr(self, f"_{self._state}")(pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        """What is left when no more text comes."""
        held, self._held = self._held, ""
        return [Piece(held)] if held and self._state in ("start", "text", "head") and (self.calls == 0 or held.strip()) else []

    def _start(self, pieces: list[Piece]) -> bool:
        """At the beginning: an opening, a brace that is one, or text."""
        lead = self._held.lstrip()
        if not lead:
            return False
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
        opening = self.form.opening
        at = self._held.find(opening) if opening else -1
        if at >= 0:
            if said := self._held[:at].rstrip() if self.calls == 0 else self._held[:at].strip():
                pieces.append(Piece(said))
            self._held, self._state = self._held[at + len(opening) :], "call" if self.form.listed else "head"
            return True
        keep = next((n for n in range(min(len(opening), len(self._held)), 0, -1) if self._held.endswith(opening[:n])), 0)
        keep += len(self._held[: len(self._held) - keep]) - len(self._held[: len(self._held) - keep].rstrip()) if opening else 0
        if said := self._held[: len(self._held) - keep]:
            pieces.append(Piece(said))
        self._held = self._held[len(self._held) - keep :]
        return False

    def _call(self, pieces: list[Piece]) -> bool:
        """The bracket of a list of calls."""
        self._held = self._held.lstrip()
        if not self._held:
            return False
        self._held, self._state = self._held.removeprefix("["), "head"
        return True

    def _head(self, pieces: list[Piece]) -> bool:
        """{"name": "…", "arguments": — nothing is shown before it is whole."""
        found = HEAD.match(self._held)
        if found is None:
            if len(self._held) > MOST_HEAD:  # no call after all
                pieces.append(Piece(self._held))
                self._held, self._state = "", "text"
            return False
        pieces.append(Piece("", self.calls, found[1]))
        self.calls += 1
        self._held, self._state, self._depth = self._held[found.end() :], "arguments", 0
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        """A JSON value, shown as it comes, to its end."""
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
        """The rest of a call; what follows is another one, or text."""
        rest = re.match(r"\s*\}?\s*", self._held)
        assert rest is not None
        after = self._held[rest.end() :]
        if self.form.opening and not self.form.listed:
            closing = self.form.closing.strip()
            if len(after) < len(closing) and closing.startswith(after):
                return False
            self._held, self._state = after.removeprefix(closing), "text"
            return True
        if not after:
            return False
        if after[0] in ",;":
            self._held, self._state = after[1:], "head"
            return True
        self._held, self._state = after[1:] if after[0] == "]" else after, "text"
        return True
