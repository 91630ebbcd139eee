"""Markdown on a terminal: what marks become, whatever the pieces a text comes in, and texts that only look like it."""

import re

import pytest

from headrace.cli.markdown import Markdown
from headrace.cli.terminal import Wrap

SGR = re.compile(r"\x1b\[[0-9]*m")
TEXT = """\
# Rivers

The **Nile** is *long*, and `ls -l *.txt` is code. 2 * 3 * 4 = 24, snake_case, 5*3.

* one **two**
- three
  - four
1. five
> a quote
```python
def f(x):  # **not bold**, and a line that is much longer than the terminal is wide, which nobody breaks
    return x * 2
```
The ***end**
"""


def shown(text: str, size: int = 1, width: int = 40) -> str:
    form = Markdown(Wrap(width))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return "".join(map(form.write, pieces)) + form.close()


def test_marks_become_looks() -> None:
    made = shown(TEXT)
    assert "\x1b[1mRivers\x1b[0m" in made
    assert "\x1b[1mNile\x1b[0m" in made
    assert "\x1b[3mlong\x1b[0m" in made
    assert "\x1b[36mls -l *.txt\x1b[0m" in made
    plain = SGR.sub("", made)
    for line in ("Rivers", "• one two", "• three", "  • four", "1. five", "│ a quote", "    return x * 2"):
        assert line in plain.splitlines()
    assert "2 * 3 * 4 = 24, snake_case, 5*3." in " ".join(plain.split())
    assert "# **not bold**, and a line that is much longer than the terminal is wide, which nobody breaks" in plain
    assert "```" not in plain
    assert made.count("\x1b[0m") >= 5


@pytest.mark.parametrize("size", [2, 3, 7, 1000])
def test_the_piece_size_changes_nothing(size: int) -> None:
    assert shown(TEXT, size) == shown(TEXT)


def test_lines_are_wrapped_by_visible_width() -> None:
    """Sequences that take no cells do not count, and no word is cut."""
    text = "**bold** word " * 20
    lines = SGR.sub("", shown(text, width=30)).splitlines()
    assert max(map(len, lines)) <= 30
    assert min(map(len, lines[:-1])) > 20
    assert " ".join(lines).split() == text.replace("*", "").split()


@pytest.mark.parametrize("text", ["**never ended\nnext", "`open\nnext", "*a\nnext", "# head\nnext"])
def test_open_styles_end_with_their_line(text: str) -> None:
    first, second = shown(text).split("\n")
    assert SGR.findall(first)[-1] == "\x1b[0m"
    assert second == "next"


@pytest.mark.parametrize("text", ["2 ** 3", "a * b", "* ", "#hash", "-5 degrees", "5*3*2", "``", "****", "x ** ** y", ""])
def test_text_that_resembles_markdown_stays(text: str) -> None:
    assert SGR.sub("", shown(text)).rstrip() in (text.rstrip(), "•", "")
    if text not in ("* ", "``"):
        assert SGR.sub("", shown(text)) == text


def test_only_the_last_word_is_held() -> None:
    """An answer goes on while it comes: all but the last word is there."""
    form = Markdown(Wrap(80))
    assert SGR.sub("", form.write("The **Nile** is lo")) == "The Nile is "
    assert form.close() == "lo"
