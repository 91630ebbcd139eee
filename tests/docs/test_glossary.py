"""The glossary has one Chinese word for a term and one term for a word, and the Chinese texts of the page use its words."""

import re
from collections import Counter

from headrace.server.page import routes
from tests.reference.glossary import terms


def rejected(text: str) -> list[str]:
    """Rejected words of the glossary in a text."""
    return [word for term in terms() for word in term.get("not", ()) if word in text]


def test_each_term_has_one_word_and_each_word_one_term() -> None:
    for key in ("en", "zh"):
        assert [word for word, count in Counter(term[key] for term in terms()).items() if count > 1] == []


def test_no_word_of_the_glossary_is_rejected() -> None:
    assert rejected("\n".join(term["zh"] for term in terms())) == []


def test_the_page_uses_the_words_of_the_glossary() -> None:
    found = re.search(r"const ZH = \{(.*?)\n\};", routes.load()["/page/texts.js"].data.decode(), re.DOTALL)
    assert found
    assert rejected(found[1]) == []
    assert rejected(found[1].replace("早退", "提前退出")) == ["提前退出"]
