"""The pages on the seeds' statements: complete, up to date, with sentences that stand in the seeds and tests that exist."""

import re
from typing import Any

import pytest

from tests import seeds, wrapping
from tests.pages import DOCS, generated, stale, written
from tests.places import data_path
from tests.unit.test_docs import is_test

DATA = seeds.load("seeds.toml")
SECTIONS = seeds.load("seed_sections.toml")
STATEMENTS: list[dict[str, Any]] = DATA["statement"]
PLACES = [
    (one["id"], *place) for one in STATEMENTS for place in [(one["seed"], one["line"], one["quote"]), *one.get("also", [])]
]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_pages_equal_the_generated_text(language: str) -> None:
    page = seeds.PAGES[language]
    for part in ("sections", "statements") if language == "en" else ("zh-sections", "zh-statements"):
        assert written(part) == generated(part), stale(part)
    numbers = [int(number) for number in re.findall(r"^### W(\d+)$", page.read_text("utf-8"), re.MULTILINE)]
    assert sorted(numbers) == list(range(1, 59))


def test_every_statement_has_its_truth_in_both_languages_and_tests_that_exist() -> None:
    topics = {topic["id"] for topic in DATA["topic"]}
    for one in STATEMENTS:
        assert one["topic"] in topics, one["id"]
        assert all(one[name].strip() for name in ("quote", "says", "en", "zh")), one["id"]
        assert [name for name in one["tests"] if not is_test(name)] == [], one["id"]
    untested = [one["id"] for one in STATEMENTS if not one["tests"]]
    assert untested == [30]  # replicas, which are not built


def test_each_statement_has_one_section_and_each_section_a_target() -> None:
    sections = SECTIONS["section"]
    numbers = [number for section in sections for number in section["statements"]]
    assert sorted(numbers) == list(range(1, 59))
    for section in sections:
        page, _, anchor = section["page"].partition("#")
        assert (DOCS / "en/understand" / page).is_file(), section
        assert section["run"] or anchor, section


@pytest.mark.parametrize("seed", SECTIONS["seeds"])
def test_quoted_sentences_occur_in_the_seed(seed: str) -> None:
    lines = data_path(f"../seeds/{SECTIONS['seeds'][seed]['file']}").read_text("utf-8").split("\n")
    quotes = [(number, line, quote) for number, where, line, quote in PLACES if where == seed]
    assert len(quotes) > 5
    assert [place for place in quotes if place[2] not in lines[place[1] - 1]] == []
    for section in SECTIONS["section"]:
        if section["seed"] == seed:
            first, last = (int(number) for number in re.findall(r"\d+", section["lines"]))
            assert 0 < first <= last <= len(lines)


def test_lines_break_at_blanks_and_chinese_punctuation_and_never_inside_code() -> None:
    text = "预填充决定首词元延迟。运算量约为 `a b c d e f g h i j` 个词元，" * 3
    lines = list(wrapping.wrapped(text, 40))
    assert max(map(wrapping.columns, lines)) <= 40
    assert all(line.count("`") % 2 == 0 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert wrapping.joined("甲\n乙 a\nb 丙") == "甲乙 a b 丙"
