"""Streaming Markdown for a terminal: formats headings, lists, quotes, emphasis and code, and wraps words.

A mark is understood at the latest one character after it, so text is held back no longer than a word. Open emphasis ends with
its line. Fenced code is neither wrapped nor changed.
"""

import re

from headrace.cli.terminal import Wrap

# SGR codes: bold, italic, cyan, dim.
BOLD, ITALIC, CODE, QUOTE = "1", "3", "36", "2"
PLAIN = "\x1b[0m"
FENCE = "```"
# What a line may begin with, whole, and as long as more could make it so.
HEADING = re.compile(r" {0,3}#{1,6} ")
ITEM = re.compile(r"( *)[-*+] ")
QUOTED = re.compile(r" {0,3}> ?(?=[^ ])")
OPEN = re.compile(r" *| {0,3}#{1,6}| *[-*+]| {0,3}> ?| {0,3}`{1,2}")


class Markdown:
    """Formats a text that comes in pieces for a terminal with SGR. Holds back the first marks of a line, and one word."""

    def __init__(self, wrap: Wrap) -> None:
        self._wrap = wrap
        # Beginning of a line, until its kind is known (`_begun`).
        self._line = ""
        self._begun = False
        self._fenced = False
        # Held-back asterisks, and the last character.
        self._stars = 0
        self._before = " "
        self._styles: list[str] = []

    def write(self, text: str) -> str:
        return "".join(map(self._take, text))

    def close(self) -> str:
        """Return the held-back text, at the end of the input."""
        return self._settle() + self._end() + self._wrap.close()

    def _take(self, char: str) -> str:
        if char == "\n":
            return self._newline()
        if self._begun:
            return char if self._fenced else self._inline(char)
        self._line += char
        if self._fenced or self._line.lstrip(" ").startswith(FENCE):
            return self._in_fence()
        return "" if OPEN.fullmatch(self._line) else self._settle()

    def _newline(self) -> str:
        if self._line.strip(" ").startswith(FENCE):
            self._fenced, self._line, self._begun = not self._fenced, "", False
            # Fences themselves are not shown.
            return self._wrap.close()
        done = self._line + "\n" if self._fenced else self._settle() + self._end() + self._wrap.write("\n")
        self._line, self._begun, self._before = "", False, " "
        return self._shown(done) if self._fenced else done

    def _in_fence(self) -> str:
        """Return code as soon as its line cannot be the closing fence."""
        marks = self._line.lstrip(" ")
        if FENCE.startswith(marks) or marks.startswith(FENCE):
            return ""
        held, self._line, self._begun = self._line, "", True
        return f"\x1b[{CODE}m{held}"

    def _shown(self, code: str) -> str:
        return code.removesuffix("\n") + PLAIN + "\n"

    def _settle(self) -> str:
        """Format the beginning of a line, now that its kind is known."""
        held, self._line, self._begun = self._line, "", True
        if match := HEADING.match(held):
            return self._set(BOLD) + self._inlines(held[match.end() :])
        if match := ITEM.match(held):
            return self._wrap.write(f"{match[1]}• ") + self._inlines(held[match.end() :])
        if match := QUOTED.match(held):
            return self._wrap.write("│ ") + self._set(QUOTE) + self._inlines(held[match.end() :])
        return self._inlines(held)

    def _inlines(self, text: str) -> str:
        return "".join(map(self._inline, text))

    def _inline(self, char: str) -> str:
        if char == "*" and CODE not in self._styles:
            self._stars += 1
            return ""
        done = self._emphasis(char) if self._stars else ""
        if char == "`":
            done += self._unset(CODE) if CODE in self._styles else self._set(CODE)
        else:
            done += self._wrap.write(char)
        self._before = char
        return done

    def _emphasis(self, after: str) -> str:
        """Handle asterisks: they end emphasis after a word, begin it before a word, otherwise they stay."""
        count, self._stars = self._stars, 0
        styles = {1: [ITALIC], 2: [BOLD], 3: [BOLD, ITALIC]}.get(count, [])
        if styles and not self._before.isspace() and all(one in self._styles for one in styles):
            return "".join(map(self._unset, styles))
        inside = self._before.isalnum() and after.isalnum() and count == 1
        if styles and not after.isspace() and not inside and not any(one in self._styles for one in styles):
            return "".join(map(self._set, styles))
        return self._wrap.write("*" * count)

    def _end(self) -> str:
        """Return the end of a line, which also ends its emphasis."""
        done = self._emphasis(" ") if self._stars else ""
        if self._fenced:
            return PLAIN if self._begun else ""
        if self._styles:
            self._styles = []
            done += self._wrap.write(PLAIN)
        return done

    def _set(self, style: str) -> str:
        self._styles.append(style)
        return self._wrap.write(f"\x1b[{style}m")

    def _unset(self, style: str) -> str:
        self._styles.remove(style)
        return self._wrap.write(PLAIN + "".join(f"\x1b[{one}m" for one in self._styles))
