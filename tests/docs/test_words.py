"""Words and lengths of the pages: columns, table cells, sentences, and the phrases of tests/house/style_phrases.txt.

tests/docs/to_rewrite.txt lists the pages that are not rewritten yet, one a line. Delete a line when its page passes; a listed
page that passes fails.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.markdown import CHINESE, Page, bad, pages
from tests.house.sizes import PHRASES
from tests.pages import PARTS
from tests.wrapping import COLUMNS, columns

TO_REWRITE = set((Path(__file__).parent / "to_rewrite.txt").read_text("utf-8").split())
GENERATED = {f"docs/{page}" for page, _ in PARTS.values()}
GENERATED_COLUMNS = 120
CELL = 120  # characters
WORDS = 40  # of one English sentence
CHARACTERS = 90  # of one Chinese sentence
PAGES = [page for page in pages() if not page.name.startswith("docs/log/")]


def faults(page: Page) -> Iterator[str]:
    """What is wrong with the wording and the lengths of a page, one line each."""
    most = GENERATED_COLUMNS if page.name in GENERATED else COLUMNS
    for number, line, _ in page.lines:
        if columns(line) > most and not line.lstrip().startswith(("![", "[![")) and "](http" not in line:
            yield f"{page.name}:{number}: {columns(line)} columns, at most {most}"
    for number, cell in page.cells:
        if len(cell) > CELL:
            yield f"{page.name}:{number}: a table cell of {len(cell)} characters, at most {CELL}"
    for number, line in page.prose:
        for phrase in PHRASES.finditer(re.sub(r"`[^`]*`", "``", line)):
            yield f"{page.name}:{number}: {phrase[0]!r} is a phrase of tests/house/style_phrases.txt"
    if page.name not in GENERATED:
        for number, sentence in page.sentences():
            long = len(CHINESE.findall(sentence)) > CHARACTERS if page.is_chinese else len(sentence.split()) > WORDS
            if long:
                yield f"{page.name}:{number}: more than {WORDS} words or {CHARACTERS} characters in a sentence: {sentence[:60]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_words_and_lengths(page: Page) -> None:
    found = list(faults(page))
    if page.name in TO_REWRITE:
        assert found, f"{page.name} passes: delete its line in tests/docs/to_rewrite.txt"
    else:
        assert found == []


def test_the_list_of_pages_to_rewrite_names_pages() -> None:
    assert TO_REWRITE - {page.name for page in PAGES} == set()


@pytest.mark.parametrize(
    ("line", "fault"),
    [(3, "columns, at most"), (5, "a table cell of"), (9, "'is told' is a phrase"), (11, "in a sentence")],
)
def test_a_bad_page_is_rejected(line: int, fault: str) -> None:
    page = bad("words.md", "docs/en/use/words.md")
    assert [one for one in faults(page) if one.startswith(f"{page.name}:{line}:") and fault in one]
