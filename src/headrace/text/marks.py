"""Keeps the content of a conversation text: control tokens written inside it are marked before the template is rendered.

A mark inside `<|im_end|>` prevents that the tokenizer finds the control token. The template carries marks along like any
other text. The tokenizer removes them after it has found the control tokens and before it splits text, so the content keeps
the tokens it would have as plain text, and so do merges across the border of template and content.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Signs of the Phaistos Disc: printable, so that repr() and JSON leave them as is, and in no living script.
SIGN = "\U000101d0"
MARK = SIGN + "\U000101d1"
LITERAL = SIGN + "\U000101d2"  # a SIGN of the content itself
SIGNS = SIGN + MARK[1] + LITERAL[1]

ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
RESULT_ROLES = frozenset(("tool", "function", "ipython", "observation"))
OWN = frozenset(("bos_token", "eos_token"))  # variables that Headrace fills with control tokens
MARKUP = re.compile(r"[<>\[\]{}|｜]")
# Methods and filters by which a template takes a text apart, and where.
CUTS = re.compile(r"\b(?:r?split|r?partition|replace)\(\s*(?:'((?:[^'\\]|\\.)+)'|\"((?:[^\"\\]|\\.)+)\")")


def unmark(text: str) -> str:
    """The text without marks."""
    return text.replace(MARK, "").replace(LITERAL, SIGN) if SIGN in text else text


def is_structure(text: str) -> bool:
    """Whether an added token that is no control token, such as `</tool_response>`, looks like part of a chat format."""
    return len(text) > 1 and MARKUP.search(text) is not None


class Marker:
    """Marks the occurrences of some tokens in texts, and the parts of them at the ends of a text.

    `tokens`: control tokens as text. `cuts`: texts at which the template splits content; the pieces have ends of their own.
    """

    def __init__(self, tokens: Iterable[str], cuts: Iterable[str] = ()) -> None:
        known = sorted({token for token in tokens if len(token) > 1})
        self._whole = re.compile(_any_of(known)) if known else None
        self._starts = {token[:end] for token in known for end in range(1, len(token))}
        self._ends = {token[at:] for token in known for at in range(1, len(token))}
        self._first, self._last = {token[0] for token in known}, {token[-1] for token in known}
        self._all = "\0".join(known)
        self._longest = max(map(len, known), default=0)
        self._cuts = re.compile("(" + "|".join(map(re.escape, sorted(cuts, key=len, reverse=True))) + ")") if cuts else None

    def text(self, text: str) -> str:
        """A content: no part of it can be a part of a control token."""
        return self._pieces(text, self._inside)

    def name(self, text: str) -> str:
        """A name or other short value. One such as `user` may be the middle of a control token that the template writes."""
        return self._pieces(text, lambda piece: False)

    def word(self, text: str) -> str:
        """A key or role, which the template compares: only whole control tokens are marked."""
        text = text.replace(SIGN, LITERAL)
        changed = 1 if self._whole else 0
        while changed and self._whole:  # tokens may overlap
            text, changed = self._whole.subn(lambda found: found[0][0] + MARK + found[0][1:], text)
        return text

    def _pieces(self, text: str, inside: Callable[[str], bool]) -> str:
        text = self.word(text)
        if self._cuts is None:
            return self._ended(text, inside)
        pieces = self._cuts.split(text)
        return "".join(piece if at % 2 else self._ended(piece, inside) for at, piece in enumerate(pieces))

    def _ended(self, text: str, inside: Callable[[str], bool]) -> str:
        """Mark the ends of a text where they could be the end or the beginning of a control token."""
        core = text.strip()
        if not core:
            return text
        at = text.index(core)
        most = min(self._longest - 1, len(core))
        sizes = range(1, most + 1)
        after = not self._first.isdisjoint(core[-most:]) and any(core[-size:] in self._starts for size in sizes)
        before = (not self._last.isdisjoint(core[:most]) and any(core[:size] in self._ends for size in sizes)) or inside(core)
        if not after and not before:
            return text
        return text[:at] + MARK * before + core + MARK * after + text[at + len(core) :]

    def _inside(self, core: str) -> bool:
        return len(core) < self._longest and core in self._all


def marked_context(context: Mapping[str, Any], control: Marker, quoted: Marker) -> dict[str, Any]:
    """A template's variables with marks in all that is content.

    `control` marks control tokens; `quoted` marks added tokens, too, in tool results, documents and quoted parts.
    """
    marked = {name: value if name in OWN else _values(value, control) for name, value in context.items() if name != "messages"}
    marked["documents"] = _values(context.get("documents"), quoted)
    return {**marked, "messages": [_message(message, control, quoted) for message in context["messages"]]}


def _message(message: Mapping[str, Any], control: Marker, quoted: Marker) -> dict[str, Any]:
    role = message["role"]
    made = _values({name: value for name, value in message.items() if name not in ("role", "content")}, control)
    made["role"] = role if role in ROLES | RESULT_ROLES else control.word(role)
    if "content" in message:
        made["content"] = _content(message["content"], quoted if role in RESULT_ROLES else control, quoted)
    return {name: made[name] for name in map(control.word, message)}  # in the order of the message


def _content(content: Any, marker: Marker, quoted: Marker) -> Any:
    """Text, or parts of which some are quoted, which become one text."""
    if isinstance(content, list):
        return "\n".join((quoted if part["type"] == "quoted" else marker).text(part["text"]) for part in content)
    return marker.text(content) if isinstance(content, str) else content


def joined_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose parts became one text, without marks."""
    content = message.get("content")
    return {**message, "content": "\n".join(part["text"] for part in content)} if isinstance(content, list) else dict(message)


def _values(value: Any, marker: Marker) -> Any:
    if isinstance(value, str):
        return marker.name(value)
    if isinstance(value, dict):
        return {marker.word(name): _values(one, marker) for name, one in value.items()}
    return [_values(one, marker) for one in value] if isinstance(value, list) else value


@functools.lru_cache(maxsize=8)
def marker_of(tokens: tuple[str, ...], template: str) -> Marker:
    """The marker for a template."""
    cuts = [one or other for one, other in CUTS.findall(template)]
    return Marker(tokens, {cut.encode("ascii", "backslashreplace").decode("unicode-escape") for cut in cuts})


def escape_all_but_marks(text: str) -> str:
    """JSON in ASCII, but for marks."""
    return re.sub(rf"[^\x00-\x7e{SIGNS}]", lambda found: json.dumps(found[0])[1:-1], text)


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for the longest of some texts, in time that does not grow with their number."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(node: dict[str, Any]) -> str:
    run = ""
    while len(node) == 1 and "" not in node:  # without a branch
        ((char, node),) = node.items()
        run += re.escape(char)
    branches = [re.escape(char) + _pattern(rest) for char, rest in node.items() if char]
    if not branches:
        return run
    return f"{run}(?:{'|'.join(branches)})" + ("?" if "" in node else "")
