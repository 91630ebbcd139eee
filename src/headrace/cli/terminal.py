"""Text on a terminal: escaped control characters, word wrap, dim notes."""

import os
import re
import shutil
import sys
from collections.abc import Callable
from typing import Protocol, TextIO

from headrace.cli.output import printable, status
from headrace.cli.output import width as cell_len

# What moves the cursor, changes colours or hides text: C0 but tab and newline, DEL, C1.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}

CLOSING = frozenset("，。！？；：、）」』】》〉”’…,.!?;:)]}")
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# Sequences without a width.
STYLE = re.compile(r"\x1b\[[0-9]*m")
LISTED = re.compile(r"\S.*?\s{2,}(?=\S)")
# Zero-width joiner: makes one sign of two.
JOINER = "\u200d"


def note(line: str) -> None:
    """Print a note on stderr: dim and wrapped on a terminal, plain elsewhere."""
    text = printable(line, keep="\n")
    if sys.stderr.isatty():
        text = "\n".join(fold(part, shutil.get_terminal_size().columns) for part in text.split("\n"))
    status().note(f"{DIM}{text}{PLAIN}" if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else text)


def fold(line: str, columns: int) -> str:
    """Wrap a line between words. In a list (name, two spaces or more, explanation) the explanation keeps its column."""
    name = LISTED.match(line)
    indent = len(name[0]) if name is not None and len(name[0]) < columns // 2 else 0
    wrap = Wrap(columns - indent)
    text = wrap.write(line[indent:]) + wrap.close()
    return line[:indent] + text.replace("\n", "\n" + " " * indent)


class TextFilter(Protocol):
    """Transforms a text that comes in pieces."""

    def write(self, text: str) -> str: ...

    def close(self) -> str:
        """Return the held-back text, at the end of the input."""


class AnswerWriter:
    """Writes an answer as it grows. A file or a pipe gets it unchanged.

    On a terminal control characters are escaped. wrapped: wrap between words. form: makes a filter around the wrapping.
    """

    def __init__(
        self, out: TextIO | None = None, *, wrapped: bool = False, form: "Callable[[Wrap], TextFilter] | None" = None
    ) -> None:
        self._out = out or sys.stdout
        self._terminal = self._out.isatty()
        wrap = Wrap(shutil.get_terminal_size().columns)
        self._wrap: TextFilter | None = (form(wrap) if form else wrap) if wrapped and self._terminal else None
        self._last = "\n"

    def write(self, text: str) -> None:
        if self._terminal:
            text = text.translate(CONTROLS)
        if text:
            self._last = text[-1]
            self._put(self._wrap.write(text) if self._wrap else text)

    def close(self) -> None:
        """End the answer's last line."""
        self._put((self._wrap.close() if self._wrap else "") + ("" if self._last == "\n" else "\n"))
        self._last = "\n"

    def _put(self, text: str) -> None:
        if text:
            status().finish()
        self._out.write(text)
        self._out.flush()


class Wrap:
    """Wraps a text that comes in pieces into lines of at most `width` cells.

    Breaks between words, and between wide characters (CJK has no spaces), but not before closing punctuation. A word is held
    back until it ends; the terminal breaks a word longer than a line.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._column = 0
        self._word = ""

    def write(self, text: str) -> str:
        return "".join(map(self._take, text))

    def close(self) -> str:
        """Return the held-back word, at the end of the input."""
        word, self._word = self._word, ""
        cells = cell_len(STYLE.sub("", word))
        breaks = self._column > 0 and self._column + cells > self.width
        self._column = cells if breaks else self._column + cells
        return "\n" + word if breaks else word

    def _take(self, char: str) -> str:
        if char == "\n":
            done = self.close()
            self._column = 0
            return done + char
        if char.isspace():
            return self.close() + self._space(char)
        done = self.close() if self._may_break_before(char) else ""
        self._word += char
        return done

    def _space(self, char: str) -> str:
        self._column += cell_len(char) or 1
        if self._column <= self.width:
            return char
        # A space at the end of a line becomes the line break.
        self._column = 0
        return "\n"

    def _may_break_before(self, char: str) -> bool:
        if not self._word or cell_len(char) == 0 or char in CLOSING or self._word[-1] == JOINER:
            return False
        return cell_len(char) == 2 or cell_len(self._word[-1]) == 2
