"""Lines of generated pages: at most 100 columns, of which a Chinese character takes two."""

import re
import unicodedata
from collections.abc import Iterator

COLUMNS = 100
TOKENS = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|.")  # code and links are not broken
BREAKS = frozenset(" ，。；：、）")


def joined(text: str) -> str:
    """Chinese text of several lines as one: no blank where a line ended between Chinese characters."""
    lines = [line.strip() for line in text.strip().splitlines()]
    whole = lines[0]
    for line in lines[1:]:
        blank = "" if wide(whole[-1]) or wide(line[0]) else " "
        whole += blank + line
    return whole


def wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


def columns(text: str) -> int:
    """Width of a text in a terminal: a Chinese character takes two columns."""
    return sum(2 if wide(character) else 1 for character in text)


def wrapped(text: str, limit: int = COLUMNS) -> Iterator[str]:
    """Lines of at most `limit` columns, broken at blanks and after Chinese punctuation; never inside `code` or a link."""
    line = ""
    for piece in pieces(text):
        if line and columns(line + piece.rstrip()) > limit:
            yield line.rstrip()
            line = ""
        line += piece
    if line.strip():
        yield line.rstrip()


def pieces(text: str) -> Iterator[str]:
    """Parts of a text after which a line may end."""
    part = ""
    for token in TOKENS.findall(text):
        part += token
        if token in BREAKS:
            yield part
            part = ""
    yield part
