"""Words and lengths of the pages: columns, table cells, sentences, and the phrases of tests/house/style_phrases.txt."""

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.docs.markdown import CHINESE, Page, bad, pages
from tests.house.sizes import PHRASES
from tests.pages import PARTS
from tests.wrapping import COLUMNS, columns

GENERATED = {f"docs/{page}" for page, _ in PARTS.values()}
CELL = 120  # characters
WORDS = 40  # of one English sentence
CHARACTERS = 90  # of one Chinese sentence
# Code and option names are not prose.
CODE = re.compile(r"`[^`]*`|(?<!\S)--[a-z][\w-]*")
# A line that cannot be broken: a link or a picture alone, as an entry of a list or after a mark.
ONE_LINK = re.compile(r" *(?:[*-] |\d+\. |> )?!?\[(?:[^\]]|\]\([^)]*\)\])*\]\([^)\s]*\)[.,;:。，；：]?")
PAGES = [page for page in pages() if not page.name.startswith("docs/log/")]


def faults(page: Page) -> Iterator[str]:
    """What is wrong with the wording and the lengths of a page, one line each."""
    for number, line, _ in page.lines:
        if columns(line) > COLUMNS and not ONE_LINK.fullmatch(line):
            yield f"{page.name}:{number}: {columns(line)} columns, at most {COLUMNS}; only a link alone may be longer"
    for number, cell in page.cells:
        if len(cell) > CELL:
            yield f"{page.name}:{number}: a table cell of {len(cell)} characters, at most {CELL}"
    lines = [(number, CODE.sub("``", line)) for number, line in page.prose]
    for (number, line), (_, following) in pairwise([*lines, (0, "")]):
        for phrase in PHRASES.finditer(f"{line} {following.lstrip()}"):
            if phrase.start() < len(line):
                yield f"{page.name}:{number}: {phrase[0]!r} is a phrase of tests/house/style_phrases.txt"
    if page.name not in GENERATED:
        for number, sentence in page.sentences():
            long = len(CHINESE.findall(sentence)) > CHARACTERS if page.is_chinese else len(sentence.split()) > WORDS
            if long:
                yield f"{page.name}:{number}: more than {WORDS} words or {CHARACTERS} characters in a sentence: {sentence[:60]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_words_and_lengths(page: Page) -> None:
    assert list(faults(page)) == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (3, "columns, at most"),
        (5, "a table cell of"),
        (9, "'is told' is a phrase"),
        (11, "in a sentence"),
        (15, "columns, at most"),
        (19, "'beside' is a phrase"),
        (23, "'as they are' is a phrase"),
    ],
)
def test_a_bad_page_is_rejected(line: int, fault: str) -> None:
    page = bad("words.md", "docs/en/use/words.md")
    assert [one for one in faults(page) if one.startswith(f"{page.name}:{line}:") and fault in one]


def test_a_long_link_and_an_option_name_are_accepted() -> None:
    page = bad("words.md", "docs/en/use/words.md")
    assert [one for one in faults(page) if re.match(rf"{page.name}:(?:17|21):", one)] == []
