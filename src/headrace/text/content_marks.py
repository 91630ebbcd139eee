"""Marks that keep control tokens inside a conversation's content plain text.

A mark inside `<|im_end|>` hides the control token from the tokenizer. Marks are inserted before the template is rendered, and
the template copies them like any text. The tokenizer removes them after it has matched the control tokens and before it splits
text, so the content gets the tokens of plain text, also where merges cross the border of template and content.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Signs of the Phaistos Disc: printable, so repr() and JSON do not escape them, and in no living script.
SIGN = "\U000101d0"
MARK = SIGN + "\U000101d1"
# Stands for a SIGN in the content itself.
LITERAL = SIGN + "\U000101d2"
SIGNS = SIGN + MARK[1] + LITERAL[1]

ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
RESULT_ROLES = frozenset(("tool", "function", "ipython", "observation"))
# Template variables that hold control tokens.
TOKEN_VARIABLES = frozenset(("bos_token", "eos_token"))
MARKUP = re.compile(r"[<>\[\]{}|｜]")
# Calls in a template that split a text, with the separator.
CUTS = re.compile(r"\b(?:r?split|r?partition|replace)\(\s*(?:'((?:[^'\\]|\\.)+)'|\"((?:[^\"\\]|\\.)+)\")")


def unmark(text: str) -> str:
    """The text without marks."""
    return text.replace(MARK, "").replace(LITERAL, SIGN) if SIGN in text else text


def is_structure(text: str) -> bool:
    """Whether an added token that is no control token, such as `</tool_response>`, looks like part of a chat format."""
    return len(text) > 1 and MARKUP.search(text) is not None


class Marker:
    """Marks the occurrences of tokens in texts, and parts of tokens at both ends of a text.

    tokens: control tokens as text. cuts: separators at which the template splits content; each piece has two ends.
    """

    def __init__(self, tokens: Iterable[str], cuts: Iterable[str] = ()) -> None:
        known = sorted({token for token in tokens if len(token) > 1})
        self._whole = re.compile(any_of(known)) if known else None
        self._starts = {token[:end] for token in known for end in range(1, len(token))}
        self._ends = {token[at:] for token in known for at in range(1, len(token))}
        self._first, self._last = {token[0] for token in known}, {token[-1] for token in known}
        self._all = "\0".join(known)
        self._longest = max(map(len, known), default=0)
        self._cuts = re.compile("(" + "|".join(map(re.escape, sorted(cuts, key=len, reverse=True))) + ")") if cuts else None

    def text(self, text: str) -> str:
        """Mark a content, which must not form a control token together with the template's text."""
        return self._pieces(text, self._inside)

    def name(self, text: str) -> str:
        """Mark a name or another short value, which may be the middle of a control token that the template writes."""
        return self._pieces(text, lambda piece: False)

    def word(self, text: str) -> str:
        """Mark complete control tokens only, in a key or role that the template compares."""
        text = text.replace(SIGN, LITERAL)
        # Repeats because tokens may overlap.
        changed = 1 if self._whole else 0
        while changed and self._whole:
            text, changed = self._whole.subn(lambda match: match[0][0] + MARK + match[0][1:], text)
        return text

    def _pieces(self, text: str, inside: Callable[[str], bool]) -> str:
        text = self.word(text)
        if self._cuts is None:
            return self._mark_ends(text, inside)
        pieces = self._cuts.split(text)
        return "".join(piece if at % 2 else self._mark_ends(piece, inside) for at, piece in enumerate(pieces))

    def _mark_ends(self, text: str, inside: Callable[[str], bool]) -> str:
        """Mark the ends of a text that could be the beginning or the end of a control token."""
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
    """Return the variables of a template with marks in all content.

    control: marks control tokens. quoted: also marks other added tokens, in tool results, documents and quoted parts.
    """
    marked = {
        name: value if name in TOKEN_VARIABLES else _values(value, control)
        for name, value in context.items()
        if name != "messages"
    }
    marked["documents"] = _values(context.get("documents"), quoted)
    return {**marked, "messages": [_message(message, control, quoted) for message in context["messages"]]}


def _message(message: Mapping[str, Any], control: Marker, quoted: Marker) -> dict[str, Any]:
    role = message["role"]
    marked = _values({name: value for name, value in message.items() if name not in ("role", "content")}, control)
    marked["role"] = role if role in ROLES | RESULT_ROLES else control.word(role)
    if "content" in message:
        marked["content"] = _content(message["content"], quoted if role in RESULT_ROLES else control, quoted)
    # Keeps the order of the message, which a template may show.
    return {name: marked[name] for name in map(control.word, message)}


def _content(content: Any, marker: Marker, quoted: Marker) -> Any:
    """Mark a text, or join parts, some of them quoted, to one marked text."""
    if isinstance(content, list):
        return "\n".join((quoted if part["type"] == "quoted" else marker).text(part["text"]) for part in content)
    return marker.text(content) if isinstance(content, str) else content


def joined_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its parts joined to one text, without marks."""
    content = message.get("content")
    return {**message, "content": "\n".join(part["text"] for part in content)} if isinstance(content, list) else dict(message)


def _values(value: Any, marker: Marker) -> Any:
    if isinstance(value, str):
        return marker.name(value)
    if isinstance(value, dict):
        return {marker.word(name): _values(item, marker) for name, item in value.items()}
    return [_values(item, marker) for item in value] if isinstance(value, list) else value


@functools.lru_cache(maxsize=8)
def marker_of(tokens: tuple[str, ...], template: str) -> Marker:
    """Return the marker for a template."""
    cuts = [single or double for single, double in CUTS.findall(template)]
    return Marker(tokens, {cut.encode("ascii", "backslashreplace").decode("unicode-escape") for cut in cuts})


def escape_all_but_marks(text: str) -> str:
    """Escape JSON text to ASCII, except marks."""
    return re.sub(rf"[^\x00-\x7e{SIGNS}]", lambda match: json.dumps(match[0])[1:-1], text)


def any_of(texts: Iterable[str]) -> str:
    """Return a pattern for the longest match of several texts, as a trie: its time does not grow with their number."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern(tree)


def _pattern(node: dict[str, Any]) -> str:
    run = ""
    while len(node) == 1 and "" not in node:
        ((char, node),) = node.items()
        run += re.escape(char)
    branches = [re.escape(char) + _pattern(rest) for char, rest in node.items() if char]
    if not branches:
        return run
    return f"{run}(?:{'|'.join(branches)})" + ("?" if "" in node else "")
